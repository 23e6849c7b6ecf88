"""DDP by each of its launchers: forked, in a notebook, spawned, and by running the script again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
from launches import FORKS, STARTS
from nbclient import NotebookClient

HERE = Path(__file__).parent
CELL = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
sys.path.insert(0, {here!r})
import torch, launches
torch.set_num_threads(1)
launches.train(Path({folder!r}), launches.FORKS)
"""


def assert_trained(folder, runs):
    for strategy, package in runs:
        for rank in (0, 1):
            told = json.loads((folder / f"{strategy}-{package}-{rank}.json").read_text())
            assert told == {
                "same": True,
                "optimizer": "torch_bf16.optim.adam",
                "weights": ["torch.bfloat16"],
                "steps": 3,
            }, (strategy, package, rank)


def test_a_notebook_forks_replicas_that_train_to_the_same_bits(tmp_path, monkeypatch):
    # ipykernel on Python 3.11 and newer asks for it, for its debugger.
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.v4.new_notebook()
    code = CELL.format(here=str(HERE), folder=str(tmp_path))
    notebook.cells = [nbformat.v4.new_code_cell(code)]
    NotebookClient(notebook, timeout=200, kernel_name="python3").execute(cwd=str(tmp_path))
    assert_trained(tmp_path, FORKS)


def test_replicas_that_are_spawned_or_started_by_the_script_train_to_the_same_bits(tmp_path):
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, HERE / "launches.py", tmp_path],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(200)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert code == 0, (tmp_path / "log").read_text()[-3000:]
    assert_trained(tmp_path, STARTS)
