"""notebook_launcher, whose ``mixed_precision`` Accelerate exports under a name nobody reads."""

from __future__ import annotations

import json
import os

import nbformat
import pytest
from accelerate import notebook_launcher
from free_port import free_port
from nbclient import NotebookClient

DEFINE = """
import json, os, hashlib
from accelerate import Accelerator, notebook_launcher

def train(folder):
    import torch
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(5):
        loss = model(torch.randn(4, 8)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    weight = next(model.parameters())
    result = {
        "mode": accelerator.mixed_precision,
        "processes": accelerator.num_processes,
        "weights": str(weight.dtype),
        "digest": hashlib.sha256(weight.detach().view(torch.uint8).numpy().tobytes()).hexdigest(),
    }
    with open(os.path.join(folder, f"{accelerator.process_index}.json"), "w") as file:
        json.dump(result, file)
    accelerator.wait_for_everyone()
"""

LAUNCH = """
options = dict(num_processes={n}, mixed_precision={mode!r}, use_port={port!r})
notebook_launcher(train, ({folder!r},), **options)
assert "ACCELERATE_MIXED_PRECISION" not in os.environ
"""


def test_a_notebook_launches_two_processes_and_then_one(tmp_path, monkeypatch):
    """In a real kernel: it forks, so that registering must not have touched a device."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    # ipykernel on Python 3.11 and newer asks for it, for its debugger.
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.v4.new_notebook()
    # What preparing imports, once instead of in each process.
    cells = ["import torch._dynamo, torch.distributed.fsdp", DEFINE]
    for n, mode in ((2, "bf16-stochastic"), (1, "bf16-fp32-master")):
        folder = tmp_path / str(n)
        folder.mkdir()
        cells.append(LAUNCH.format(folder=str(folder), n=n, mode=mode, port=str(free_port())))
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    client = NotebookClient(notebook, timeout=120, kernel_name="python3")
    client.execute(cwd=str(tmp_path))

    two = [json.loads((tmp_path / "2" / f"{rank}.json").read_text()) for rank in range(2)]
    assert two[0] == two[1]
    assert two[0]["mode"] == "bf16-stochastic"
    assert two[0]["processes"] == 2
    assert two[0]["weights"] == "torch.bfloat16"
    one = json.loads((tmp_path / "1" / "0.json").read_text())
    assert one["mode"] == "bf16-fp32-master"
    assert one["processes"] == 1
    assert one["weights"] == "torch.bfloat16"


def test_launcher_imported_by_name_before_us_knows_the_modes(tmp_path, run_unhooked):
    script = DEFINE + "import accelerate_bf16\n"
    script += LAUNCH.format(folder=str(tmp_path), n=1, mode="bf16-stochastic", port="0")
    done = run_unhooked(script, folder=tmp_path, BF16_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "0.json").read_text())["mode"] == "bf16-stochastic"


def test_variable_is_put_back_and_wins_where_no_mode_is_named(monkeypatch):
    name = "ACCELERATE_MIXED_PRECISION"
    monkeypatch.setenv(name, "bf16-fp32-master")
    seen = []
    for given in ({"mixed_precision": "bf16-stochastic"}, {}):
        notebook_launcher(
            lambda: seen.append((os.environ[name], os.environ.get("BF16_MODE"))),
            num_processes=1,
            **given,
        )
    # The second one outweighs what the launched function names itself.
    assert seen == [("bf16-stochastic", "bf16-stochastic"), ("bf16-fp32-master", None)]
    assert os.environ[name] == "bf16-fp32-master"
    assert "BF16_MODE" not in os.environ


def test_misspelt_mode_is_refused_with_the_names():
    with pytest.raises(
        ValueError, match=r"mixed_precision='bf16-sr' is not a mode .*bf16-fp32-master"
    ):
        notebook_launcher(lambda: None, num_processes=1, mixed_precision="bf16-sr")
