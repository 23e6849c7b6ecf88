"""Standard output and standard error: where a command prints, and what becomes of closed ones."""

import json
import os
import subprocess
import sys

import pytest

_NOISY = """
import os
import sys

import torch

print("imported")


def loss():
    print("made")
    os.system("echo from a child")
    # As a compiled library would print.
    import ctypes
    ctypes.CDLL(None).printf(b"from C")
    return torch.nn.Sequential(torch.nn.Linear(8, 1), torch.nn.Flatten(0), Mean())


class Mean(torch.nn.Module):
    def forward(self, x):
        return x.square().mean()


def make():
    return loss(), [torch.randn(8, 8)] * 4


if __name__ == "__main__":
    model = loss()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(100):
        model(torch.randn(8, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def shell(command, **options):
    """Run ``command`` of bash, with ``torch_bf16`` for the program, and end with its status."""
    # Buffered, as without PYTHONUNBUFFERED, so that some errors would show only at exit.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    command = command.replace("torch_bf16", f"{sys.executable} -m torch_bf16", 1)
    return subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


@pytest.mark.parametrize(
    ("redirected", "status", "said"),
    [
        (">&-", 0, ""),
        ("2>&- | cat", 0, ""),
        ("| true", 0, ""),
        ("> /dev/full", 2, "python -m torch_bf16 estimate: [Errno 28] No space left on device\n"),
        ("--json - > /dev/full", 2, "python -m torch_bf16 estimate: [Errno 28] No space left "),
        ("--json - >&-", 0, ""),
        ("--json - 2>&- | cat", 0, ""),
    ],
)
def test_output_that_goes_nowhere_ends_without_a_traceback(redirected, status, said):
    done = shell(f"torch_bf16 estimate 1M --ranks 1 {redirected}", stdout=subprocess.DEVNULL)
    assert done.returncode == status
    assert done.stderr.startswith(said)
    assert bool(done.stderr) == bool(said)


def test_an_error_whose_reader_is_gone_keeps_its_status():
    # "true" is done long before the command has been imported.
    assert shell("torch_bf16 doctor nofile.pt 2>&1 | true").returncode == 2


def test_a_benchmark_measures_with_closed_streams(tmp_path):
    record = tmp_path / "record.json"
    sizes = "--parameters 2304 --tensors 3 --rounds 1 --recipes bf16-stochastic --backend eager"
    done = shell(f"torch_bf16 bench {sizes} --json {record} <&- >&- 2>&-")
    assert (done.returncode, done.stdout) == (0, "")
    assert json.loads(record.read_text())["results"]


@pytest.mark.parametrize(
    "arguments", ["estimate noisy.py:loss", "recommend noisy.py:make --lr 1e-3 --steps 4"]
)
def test_json_on_standard_output_is_all_that_is_printed_there(arguments, tmp_path):
    (tmp_path / "noisy.py").write_text(_NOISY)
    done = shell(f"torch_bf16 {arguments} --json -", cwd=tmp_path)
    assert json.loads(done.stdout)["schema"] == 1
    for line in ("imported", "made", "from a child", "from C"):
        assert line in done.stderr


def test_what_a_script_prints_goes_to_standard_error(tmp_path):
    (tmp_path / "noisy.py").write_text(_NOISY)
    done = shell("torch_bf16 recommend noisy.py --steps 4", cwd=tmp_path)
    assert "RECOMMENDED" in done.stdout
    for line in ("imported", "made", "from a child", "from C"):
        assert line in done.stderr
        assert line not in done.stdout
