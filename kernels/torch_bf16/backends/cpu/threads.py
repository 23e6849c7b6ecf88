"""Running a job on as many threads as torch uses: on torch's own threads, if possible.

Torch's operations run on a team of OpenMP threads, which spin for a while after each operation. A
second team would have to wait for them, so a job runs on the same team. Where that cannot be had, a
job runs on Python's threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from torch_bf16.backends.subnormals import flushes_subnormals, subnormals_kept
from torch_bf16.backends.team import torchs_team
from torch_bf16.errors import mark_partial

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
    if not flushes_subnormals():
        _run(work, job, max_threads)
    elif (keeping := keeping_subnormals()) is not None:
        function: Any = work
        job[FUNCTION] = ctypes.cast(function, ctypes.c_void_p).value
        _run(keeping, job, max_threads)
    else:
        with subnormals_kept():
            _run(work, job, max_threads)


def _run(work: Work, job: np.ndarray, max_threads: int) -> None:
    threads = min(torch.get_num_threads(), max_threads)
    share(job, threads)
    if threads <= 1:
        work(job.ctypes.data)
    elif (parallel := torchs_team()) is not None:
        parallel(work, job.ctypes.data, threads, 0)
    else:
        _run_on_pool(work, job.ctypes.data, threads)
    if not finished(job):
        error = RuntimeError(
            "a kernel of torch_bf16's cpu backend broke off, for the reason printed above"
        )
        mark_partial(error)
        raise error


def _run_on_pool(work: Work, job: int, threads: int) -> None:
    # Kernels work on addresses, so nothing may be freed while a thread still runs, and none may
    # begin afterwards: it works only while it holds its turn, and at the end all turns are taken.
    turns, jobs = [threading.RLock() for _ in range(threads - 1)], [job]

    def share_work(turn: Any) -> None:
        if turn.acquire(blocking=False):
            try:
                for each in jobs:
                    work(each)
            finally:
                turn.release()

    try:
        # If no more threads can be started, those that there are do everything.
        with contextlib.suppress(RuntimeError):
            for turn in turns:
                _pool(os.getpid()).submit(share_work, turn)
        work(job)
    finally:
        _take(turns)
        # A lock is known by its thread's id, which another one may have once this thread has ended.
        jobs.clear()


def _take(turns: Sequence[Any]) -> None:
    """Take all turns, in spite of interrupts; the last one is raised when all are taken."""
    interrupt = None
    while True:
        try:
            for turn in turns:
                turn.acquire()
            break
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


@functools.lru_cache(maxsize=1)
def _pool(process_id: int) -> ThreadPoolExecutor:
    """The pool of a process; keyed by its id, because a forked child inherits no threads."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="torch_bf16")
