"""One thread per test process: pytest-xdist already fills the cores, and threads of two processes
that compete for one core wait for each other at every operation, which is many times slower."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def interpreted():
    """``interpreted(function, *arguments)``: a call in a process where Triton interprets.

    Triton decides at its import whether it does, and other tests of this process compile.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(int).result(timeout=60)
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=120)


@pytest.fixture(autouse=True)
def _seeded():
    """A test sees the same random numbers alone, in any order and on any worker."""
    # Imported here, because torch reads the variable above when it is loaded.
    import torch

    torch.manual_seed(0)
