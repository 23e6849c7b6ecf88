"""Accumulation and release where gradients are reduced: DDP and FSDP2, two processes over gloo."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gradients_replica import CASES

HERE = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What two ranks printed, after running every case."""
    folder = tmp_path_factory.mktemp("ranks")
    processes = []
    for rank in (0, 1):
        command = [sys.executable, "gradients_replica.py", str(rank), "2", str(folder / "meet")]
        with (folder / f"{rank}.log").open("w") as log:
            process = subprocess.Popen(
                command,
                cwd=HERE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        processes.append(process)
    try:
        for process in processes:
            process.wait(150)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return [(folder / f"{rank}.log").read_text() for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_sums_and_replicas_are_right(outcome, case):
    for log in outcome:
        assert f"{case}: passed" in log.splitlines(), log[-3000:]
