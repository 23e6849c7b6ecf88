"""Standard output and standard error: where a command prints, and what becomes of closed ones."""

import json

import pytest
from forked_commands import CLOSED, NO_READER, run_command

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


@pytest.mark.parametrize(
    ("streams", "arguments", "status", "said"),
    [
        ({"stdout": CLOSED}, "", 0, ""),
        ({"stderr": CLOSED}, "", 0, ""),
        ({"stdout": NO_READER}, "", 0, ""),
        ({"stdout": "/dev/full"}, "", 2, "[Errno 28] No space left on device\n"),
        ({"stdout": "/dev/full"}, "--json -", 2, "[Errno 28] No space left "),
        ({"stdout": CLOSED}, "--json -", 0, ""),
        ({"stderr": CLOSED}, "--json -", 0, ""),
    ],
)
def test_output_that_goes_nowhere_ends_without_a_traceback(
    streams, arguments, status, said, tmp_path
):
    command = f"estimate 1M --ranks 1 {arguments}".split()
    done = run_command(*command, folder=tmp_path, **streams)
    assert done.status == status, done.stderr
    assert done.stderr.startswith(said and f"python -m torch_bf16 estimate: {said}")
    assert bool(done.stderr) == bool(said)


def test_an_error_whose_reader_is_gone_keeps_its_status(tmp_path):
    gone = {"stdout": NO_READER, "stderr": NO_READER}
    assert run_command("doctor", "nofile.pt", folder=tmp_path, **gone).status == 2


def test_a_benchmark_measures_with_closed_streams(tmp_path):
    """Also in the interpreter that it starts for the peak."""
    sizes = "--parameters 2304 --tensors 3 --rounds 1 --backend eager"
    one_row = "--recipes bf16-stochastic --baseline bf16-stochastic --against"
    command = [*f"bench {sizes} --json record.json {one_row}".split(), ""]
    closed = dict.fromkeys(("stdin", "stdout", "stderr"), CLOSED)
    assert run_command(*command, folder=tmp_path, **closed).status == 0
    (row,) = json.loads((tmp_path / "record.json").read_text())["results"]
    assert row["peak_bytes_per_parameter"] is None or row["peak_bytes_per_parameter"] > 0


@pytest.mark.parametrize(
    "arguments", ["estimate noisy.py:loss", "recommend noisy.py:make --lr 1e-3 --steps 4"]
)
def test_json_on_standard_output_is_all_that_is_printed_there(arguments, tmp_path):
    (tmp_path / "noisy.py").write_text(_NOISY)
    done = run_command(*arguments.split(), "--json", "-", folder=tmp_path)
    assert json.loads(done.stdout)["schema"] == 1
    for line in ("imported", "made", "from a child", "from C"):
        assert line in done.stderr


def test_what_a_script_prints_goes_to_standard_error(tmp_path):
    (tmp_path / "noisy.py").write_text(_NOISY)
    done = run_command("recommend", "noisy.py", "--steps", "4", folder=tmp_path)
    assert "RECOMMENDED" in done.stdout
    for line in ("imported", "made", "from a child", "from C"):
        assert line in done.stderr
        assert line not in done.stdout
