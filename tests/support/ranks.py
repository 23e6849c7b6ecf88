"""A script run by several processes at once, as their ranks, bounded in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def started_ranks(script: Path, world: int, folder: Path) -> Iterator[list[subprocess.Popen]]:
    """``world`` processes of ``script RANK STORE FOLDER``, killed at the end if they are left.

    What each prints goes to ``RANK.log`` in the folder.
    """
    processes: list[subprocess.Popen] = []
    try:
        for rank in range(world):
            with (folder / f"{rank}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, script, str(rank), folder / "store", folder],
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run_ranks(script: Path, world: int, folder: Path, seconds: int = 240) -> list[str]:
    """What each of ``world`` processes of ``script RANK STORE FOLDER`` printed.

    All must end with 0. One that fails leaves the others waiting for it, so that they are killed.
    """
    with started_ranks(script, world, folder) as processes:
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline or any(process.poll() for process in processes):
                break
            time.sleep(0.1)
    texts = [(folder / f"{rank}.log").read_text() for rank in range(world)]
    codes = [process.returncode for process in processes]
    assert codes == [0] * world, "\n".join([str(codes), *(text[-3000:] for text in texts)])
    return texts
