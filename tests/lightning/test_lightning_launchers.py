"""DDP by each of its launchers: forked, in a notebook, spawned, and by running the script again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from launches import FORKS, STARTS
from nbclient import NotebookClient

HERE = Path(__file__).parent
LIMIT = 500  # seconds, for what takes 30 on two idle cores
pytestmark = pytest.mark.timeout(600)
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
    """Both replicas of each run have the same bits; all runs are looked at before one is blamed."""
    failures = [each.read_text() for each in folder.glob("*.failed")]
    assert not failures, "\n".join(failures)
    good = {
        "same": True,
        "optimizer": "torch_bf16.optim.adam",
        "weights": ["torch.bfloat16"],
        "steps": 3,
    }
    names = ["-".join([*run, rank]) for run in runs for rank in "01"]
    files = [folder / f"{name}.json" for name in names]
    found = [json.loads(each.read_text()) if each.exists() else None for each in files]
    assert dict(zip(names, found, strict=True)) == dict.fromkeys(names, good)


def test_replicas_that_a_notebook_forks_train_to_the_same_bits(tmp_path):
    made = nbformat.v4.new_notebook()
    code = CELL.format(here=str(HERE), folder=str(tmp_path))
    made.cells = [nbformat.v4.new_code_cell(code)]
    with pytest.MonkeyPatch.context() as patch:
        # ipykernel on Python 3.11 and newer asks for it, for its debugger.
        patch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
        patch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        NotebookClient(made, timeout=LIMIT, kernel_name="python3").execute(cwd=str(tmp_path))
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
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Also those that wait for one that failed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert code == 0, (tmp_path / "log").read_text()[-3000:]
    assert_trained(tmp_path, STARTS)
