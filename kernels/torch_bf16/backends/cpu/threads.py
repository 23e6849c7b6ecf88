"""Running a job on as many threads as torch uses: on torch's own threads, if possible.

Torch's operations run on a team of OpenMP threads, which spin for a while after each operation. A
second team would have to wait for them, so a job runs on the same team: ``GOMP_parallel`` is what
GCC compiles ``#pragma omp parallel`` to, and LLVM's and Intel's libraries have it, too. Elsewhere,
and in a forked child, where GNU's library waits forever for the threads of its parent, a job runs
on Python's threads.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch

from torch_bf16.backends.subnormals import flushes_subnormals
from torch_bf16.errors import mark_partial

from . import PROCESS
from .job import FUNCTION, Work, finished, share
from .subnormals import keeping_subnormals

__all__ = ["run"]


def run(work: Work, job: np.ndarray, max_threads: int) -> None:
    """Do a whole job; return when every thread is done with it.

    Args:
        work: the function that each thread calls.
        job: its argument.
        max_threads: the calling thread included; at most ``torch.get_num_threads()`` are used.

    Raises:
        RuntimeError: part of the job failed; the reason was printed.
    """
    threads = min(torch.get_num_threads(), max_threads)
    share(job, threads)
    if flushes_subnormals() and (keeping := keeping_subnormals()) is not None:
        function: Any = work
        job[FUNCTION] = ctypes.cast(function, ctypes.c_void_p).value
        work = keeping
    if threads <= 1:
        work(job.ctypes.data)
    elif (parallel := _torchs_team()) is not None and os.getpid() == PROCESS:
        parallel(work, job.ctypes.data, threads, 0)
    else:
        _run_on_pool(work, job.ctypes.data, threads)
    if not finished(job):
        error = RuntimeError(
            "a kernel of torch_bf16's cpu backend broke off, for the reason printed above"
        )
        mark_partial(error)
        raise error


@functools.cache
def _torchs_team() -> Callable[..., None] | None:
    """``GOMP_parallel(function, argument, threads, flags)`` of the library that torch runs on."""
    # Tested on Linux only.
    if sys.platform != "linux" or not torch.backends.openmp.is_available():
        return None
    # The order in which torch itself finds it: preloaded libraries, then those it is linked to.
    for library in (None, torch._C.__file__):
        try:
            parallel: Any = ctypes.CDLL(library).GOMP_parallel
        except (AttributeError, OSError, TypeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return parallel
    return None


def _run_on_pool(work: Work, job: int, threads: int) -> None:
    futures = [_pool(os.getpid()).submit(work, job) for _ in range(threads - 1)]
    try:
        work(job)
    finally:
        # Kernels work on addresses: nothing may be freed while a thread still runs.
        try:
            wait(futures)
        except KeyboardInterrupt:
            wait(futures)
            raise


@functools.lru_cache(maxsize=1)
def _pool(process_id: int) -> ThreadPoolExecutor:
    """The pool of a process; keyed by its id, because a forked child inherits no threads."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="torch_bf16")
