"""ZeroRedundancyOptimizer ends with the bits of DDP by itself, whichever rank steps for what."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sharded_training import RECIPES

SCRIPT = Path(__file__).parent / "zero_training.py"
# Not imported from there: torch's import of ZeroRedundancyOptimizer warns.
WORLD, WAYS = 3, ("class", "bucket views", "converted", "named", "own step")


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """What each of the processes printed; all of them ended well."""
    folder = tmp_path_factory.mktemp("zero")
    processes = []
    try:
        for rank in range(WORLD):
            with (folder / f"{rank}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, SCRIPT, str(rank), folder / "store"],
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        deadline = time.monotonic() + 200
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline or any(process.poll() for process in processes):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    texts = [(folder / f"{rank}.log").read_text() for rank in range(WORLD)]
    codes = [process.returncode for process in processes]
    assert codes == [0] * WORLD, "\n".join([str(codes), *(text[-3000:] for text in texts)])
    return texts


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", WAYS)
def test_weights_states_and_resumed_runs_equal_those_of_ddp(logs, way, recipe):
    assert all(f"same {way} {recipe}\n" in text for text in logs)
