"""DDP by each of its launchers: forked, in a notebook, spawned, and by running the script again."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path

import pytest
from forkserver import forked
from jupyter_client import BlockingKernelClient
from jupyter_client.connect import write_connection_file
from launches import FORKS, STARTS

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


@contextlib.contextmanager
def in_fork(function, *arguments, log):
    """A process that has Lightning imported, as a real start has after 13 s of a processor."""
    with forked(in_session, str(log), function, arguments) as process:
        try:
            yield process
        finally:
            # Also those that wait for one that failed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def in_session(log, function, arguments):
    os.setsid()
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(*arguments)


def kernel(connection):
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance(argv=["-f", connection])


def test_replicas_that_a_notebook_forks_train_to_the_same_bits(tmp_path, monkeypatch):
    # ipykernel on Python 3.11 and newer asks for it, for its debugger.
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    connection, _ = write_connection_file(str(tmp_path / "kernel.json"))
    with in_fork(kernel, connection, log=tmp_path / "log"):
        notebook = BlockingKernelClient(connection_file=connection)
        notebook.load_connection_file()
        notebook.start_channels()
        try:
            cell = CELL.format(here=str(HERE), folder=str(tmp_path))
            reply = notebook.execute(cell, reply=True, timeout=LIMIT)["content"]
        finally:
            notebook.stop_channels()
    assert reply["status"] == "ok", "\n".join(reply["traceback"])
    assert_trained(tmp_path, FORKS)


def script(*command):
    sys.argv = list(command)
    runpy.run_path(command[0], run_name="__main__")


def test_replicas_that_are_spawned_or_started_by_the_script_train_to_the_same_bits(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [str(HERE / "launches.py"), str(tmp_path)]
    # Those that it spawns and starts are real starts.
    with in_fork(script, *command, log=tmp_path / "log") as process:
        process.join(LIMIT)
        code = process.exitcode
    assert code == 0, (tmp_path / "log").read_text()[-3000:]
    assert_trained(tmp_path, STARTS)
