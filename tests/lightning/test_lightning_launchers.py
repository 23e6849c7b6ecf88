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
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

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


def assert_trained(folder, run):
    name = "-".join(run)
    failures = [each.read_text() for each in folder.glob(f"{name}-*.failed")]
    assert not failures, "\n".join(failures)
    for rank in (0, 1):
        assert json.loads((folder / f"{name}-{rank}.json").read_text()) == {
            "same": True,
            "optimizer": "torch_bf16.optim.adam",
            "weights": ["torch.bfloat16"],
            "steps": 3,
        }, rank


def run_notebook(folder):
    made = nbformat.v4.new_notebook()
    code = CELL.format(here=str(HERE), folder=str(folder))
    made.cells = [nbformat.v4.new_code_cell(code)]
    end = ""
    with pytest.MonkeyPatch.context() as patch:
        # ipykernel on Python 3.11 and newer asks for it, for its debugger.
        patch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        try:
            NotebookClient(made, timeout=LIMIT, kernel_name="python3").execute(cwd=str(folder))
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            end = f"{error!r}\n{error}"
    (folder / "end").write_text(end)


def run_script(folder):
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, HERE / "launches.py", folder],
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
    end = "" if code == 0 else f"it returned {code}\n{(folder / 'log').read_text()[-3000:]}"
    (folder / "end").write_text(end)


@pytest.fixture
def notebook(filled_once):
    """Where the runs of a notebook have written, and what ended it before its time."""
    return filled_once("notebook", run_notebook)


@pytest.fixture
def script(filled_once):
    """Where the runs of a script have written, and what it ended with, if not with success."""
    return filled_once("script", run_script)


@pytest.mark.parametrize("run", FORKS, ids="-".join)
def test_replicas_that_a_notebook_forks_train_to_the_same_bits(notebook, run):
    assert_trained(notebook, run)


@pytest.mark.parametrize("run", STARTS, ids="-".join)
def test_replicas_that_are_spawned_or_started_by_the_script_train_to_the_same_bits(script, run):
    assert_trained(script, run)


def test_the_notebook_ends_well(notebook):
    assert not (notebook / "end").read_text()


def test_the_script_ends_well(script):
    assert not (script / "end").read_text()
