"""Running a kernel over all chunks of a bucket, on several threads.

The threads are Python's, over a kernel that releases the GIL, not Numba's parallel loops: Numba's
OpenMP layer aborts a forked child whose parent ran parallel code, and its workqueue layer must not
be entered by two threads at once. A forked child simply starts a pool of its own.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import count

import numpy as np
import torch

from torch_bf16.backends.bucket import Bucket

from .kernel import CHUNK, compile_step

__all__ = ["launch"]

# Chunks taken at a time: at most half a million elements, well below a millisecond of work, so that
# a thread on a busy core leaves the rest to the others.
_TURN = 16

# Elements: to wake up a thread takes as long as to update so many, a few tenths of a millisecond.
# It matters where many tensors are small.
_WORTH_A_THREAD = 1 << 18


def launch(bucket: Bucket) -> None:
    """Take one step for a bucket; returns when all threads are done."""
    if bucket.prepared is None:
        # The kernel follows runs anyway.
        kernel = compile_step(replace(bucket.variant, strided=False), bucket.scalars.shape[1])
        bucket.prepared = kernel, *_tables(bucket)
    kernel, chunks, addresses, runs = bucket.prepared
    addresses[:, 0] = [gradient.data_ptr() for gradient in bucket.gradients]
    n_chunks = len(chunks)
    turns = count(0, _TURN)

    def work() -> None:
        while (first := next(turns)) < n_chunks:
            kernel(
                chunks,
                addresses,
                bucket.numels,
                runs,
                bucket.bases,
                bucket.steps,
                bucket.rows,
                bucket.scalars,
                first,
                min(first + _TURN, n_chunks),
            )

    most = min(-(-n_chunks // _TURN), -(-int(bucket.numels.sum()) // _WORTH_A_THREAD))
    threads = min(torch.get_num_threads(), most)
    futures = [_pool(os.getpid()).submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        # The kernel writes through addresses: nothing may be freed while a thread still runs.
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
