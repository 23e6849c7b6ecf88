"""Every strategy, recipe, host and package: fit, resume, clip, accumulate, over gloo.

In each cell (``matrix.py`` is what runs) the replicas of every weight and state are bit-identical,
the way of the weights is that of fp32 training, the norm that clips is that of fp64, and what goes
on from a checkpoint ends with the bits of what was not interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lightning_models import MODES
from matrix_cells import CELLS, RESHARDED

HERE = Path(__file__).parent
TIMEOUT = 280


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each rank of two and of four processes noted; all of them ended well."""
    folder = tmp_path_factory.mktemp("matrix")
    support = str(HERE.parent / "support")
    path = os.pathsep.join([support, *filter(None, [os.environ.get("PYTHONPATH")])])
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, HERE / "matrix.py", folder],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(TIMEOUT)
        finally:
            # Also those that wait for one that failed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert code == 0, (folder / "log").read_text()[-5000:]
    return {
        (world, rank): (folder / f"{rank} of {world}").read_text().splitlines()
        for world in (2, 4)
        for rank in range(world)
    }


# One test for all cells: each worker of pytest-xdist would start the processes again.
def test_every_cell_fits_resumes_clips_and_accumulates_also_on_another_number_of_ranks(said):
    for (world, rank), lines in said.items():
        expected = [f"{cell.id} held" for cell in CELLS if cell.world == world]
        expected += [
            f"{strategy}-{world}-{package}-{mode} resharded"
            for strategy, package in RESHARDED
            for mode in MODES
        ]
        assert sorted(lines) == sorted(expected), (world, rank)
