"""Running a kernel over all chunks of a bucket, on several threads.

The threads are Python's, over a kernel that releases the GIL, not Numba's parallel loops: Numba's
OpenMP layer aborts a forked child whose parent ran parallel code, and its workqueue layer must not
be entered by two threads at once. A forked child simply starts a pool of its own.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_bf16.backends.bucket import Bucket
from torch_bf16.backends.inputs import KernelInputs
from torch_bf16.backends.pieces import pieces

from .kernel import CHUNK, compile_step
from .squares import PIECE, compile_squares

__all__ = ["CpuKernel", "squares"]

# Chunks taken at a time: at most half a million elements, well below a millisecond of work, so that
# a thread on a busy core leaves the rest to the others.
_TURN = 16

# Elements: waking a thread takes as long as updating so many, a few tenths of a millisecond.
_WORTH_A_THREAD = 1 << 18


class CpuKernel:
    """The compiled kernel of a variant, bound to a bucket.

    A call returns when all threads are done.

    Args:
        bucket: what it updates.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._chunks, self._addresses, self._runs = _tables(bucket)
        useful = -(-int(bucket.numels.sum()) // _WORTH_A_THREAD)
        self._max_threads = min(-(-len(self._chunks) // _TURN), useful)
        self._compiled: Any = None

    def __call__(self, inputs: KernelInputs) -> None:
        """Update every tensor of the bucket, in place."""
        scalars, bucket = inputs.scalars, self._bucket
        if self._compiled is None:
            self.compile(scalars.table.shape[1])
        self._addresses[:, 0] = inputs.addresses
        arguments = (
            self._chunks,
            self._addresses,
            bucket.numels,
            self._runs,
            bucket.bases if inputs.bases is None else inputs.bases,
            scalars.steps,
            scalars.rows,
            scalars.table,
        )

        def work(first: int, last: int) -> None:
            self._compiled(*arguments, first, last)

        _in_turns(work, len(self._chunks), _TURN, self._max_threads)

    def compile(self, n_scalars: int) -> None:
        """Compile the kernel, or read it from Numba's cache."""
        # One kernel serves strided tensors and all others.
        self._compiled = compile_step(replace(self._bucket.variant, strided=False), n_scalars)


def squares(tensors: Sequence[Tensor]) -> Tensor | None:
    """See :meth:`torch_bf16.backends.Backend.squares`."""
    table = pieces(tensors, PIECE)
    if table is None:
        return None
    run, sums = compile_squares(tensors[0].dtype), np.empty(len(table))
    useful = -(-int(table[:, 1].sum()) // _WORTH_A_THREAD)
    _in_turns(functools.partial(run, table, sums), len(table), 4, useful)
    return torch.tensor(sums.sum())


def _in_turns(work: Callable[[int, int], None], count: int, turn: int, max_threads: int) -> None:
    """Call ``work(first, last)`` for all of so many pieces, a few at a time, on several threads."""
    turns = itertools.count(0, turn)

    def take_turns() -> None:
        while (first := next(turns)) < count:
            work(first, min(first + turn, count))

    threads = min(torch.get_num_threads(), max_threads)
    futures = [_pool(os.getpid()).submit(take_turns) for _ in range(threads - 1)]
    try:
        take_turns()
    finally:
        # Kernels work on addresses: nothing may be freed while a thread still runs.
        wait(futures)
    for future in futures:
        future.result()


@functools.lru_cache(maxsize=1)
def _pool(process_id: int) -> ThreadPoolExecutor:
    """One pool for a process; keyed by its id, because a forked child inherits no threads."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="torch_bf16")


def _tables(bucket: Bucket) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``chunks``, ``addresses`` (column 0 the gradients') and ``runs`` as the kernel takes them."""
    chunks = [
        np.stack([np.full(len(starts), tensor, np.int64), starts], axis=1)
        for tensor, numel in enumerate(bucket.numels)
        for starts in [np.arange(0, numel, CHUNK, dtype=np.int64)]
    ]
    columns = [
        [0, *(plane.data_ptr() for planes in each for plane in planes)] for each in bucket.planes
    ]
    runs = np.stack([bucket.offsets, bucket.widths, bucket.pitches], axis=1)
    return np.concatenate(chunks), np.array(columns, np.int64), runs
