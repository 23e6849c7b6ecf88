"""Running a kernel over all chunks of a bucket, on several threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_bf16.backends.bucket import Bucket
from torch_bf16.backends.inputs import KernelInputs
from torch_bf16.backends.pieces import addresses_and_sizes, cut
from torch_bf16.backends.totals import with_factors

from . import squares as sums_of_squares
from . import threads
from .job import Work, new_job
from .kernel import CHUNK, KINDS, compile_step
from .statistic import KINDS as STATISTIC_KINDS
from .statistic import compile_statistic

__all__ = ["CpuKernel", "squares"]

# Elements. Waking a thread takes as long as updating this many: a few tenths of a millisecond.
_WORTH_A_THREAD = 1 << 18


class CpuKernel:
    """The compiled kernel of a variant, bound to a bucket.

    A call returns when all threads are done.

    Args:
        bucket: the tensors to update.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        # Without the order of indices: the sum of the statistic does not depend on it, and the step
        # has one kernel for strided and consecutive ones.
        self._variant = replace(bucket.variant, indices="consecutive")
        self._chunks, self._addresses, self._runs = _tables(bucket)
        self._max_threads = -(-int(bucket.numels.sum()) // _WORTH_A_THREAD)
        self._work: Work | None = None
        self._sums: Work | None = None

    def __call__(self, inputs: KernelInputs) -> None:
        """Update every tensor of the bucket, in place."""
        bucket = self._bucket
        scalars = with_factors(bucket.variant.rule, bucket.totals, inputs).scalars
        work = self._work = self._work or self._compiled(scalars.table.shape[1])
        self._addresses[:, 0] = inputs.addresses
        arrays: Any = (
            self._chunks,
            self._addresses,
            bucket.numels,
            self._runs,
            bucket.bases if inputs.bases is None else inputs.bases,
            scalars.steps,
            scalars.rows,
            scalars.table,
        )
        job = new_job(KINDS, arrays, len(self._chunks))
        threads.run(work, job, self._max_threads)

    def measure(self, inputs: KernelInputs) -> None:
        """Add the statistic of each tensor to the bucket's sums."""
        scalars, bucket = inputs.scalars, self._bucket
        totals: Any = bucket.totals
        work = self._sums or compile_statistic(self._variant, scalars.table.shape[1])
        self._sums = work
        self._addresses[:, 0] = inputs.addresses
        sums = np.zeros(len(bucket.numels), np.int64)
        arrays: Any = (
            self._chunks, self._addresses, bucket.numels, scalars.rows, scalars.table, sums
        )  # fmt: skip
        job = new_job(STATISTIC_KINDS, arrays, len(self._chunks))
        threads.run(work, job, self._max_threads)
        np.add.at(totals.sums.numpy(), totals.places, sums)

    def compile(self, n_scalars: int) -> None:
        """Compile the kernel, or read it from Numba's cache."""
        if self._variant.rule.statistic is not None:
            self._sums, n_scalars = compile_statistic(self._variant, n_scalars), n_scalars + 1
        self._work = self._compiled(n_scalars)

    def _compiled(self, n_scalars: int) -> Work:
        transposed = self._bucket.variant.indices == "transposed"
        return compile_step(self._bucket.variant if transposed else self._variant, n_scalars)


def squares(tensors: Sequence[Tensor]) -> Tensor | None:
    """See :meth:`torch_bf16.backends.Backend.squares`."""
    rows, size = addresses_and_sizes(tensors), sums_of_squares.PIECE
    if rows is None:
        return None
    addresses, numels = rows.T
    which, starts = cut(numels, size)
    places_of_pieces = addresses[which] + starts * tensors[0].itemsize
    table = np.stack([places_of_pieces, np.minimum(numels[which] - starts, size)], axis=1)
    sums = np.empty(len(table))
    useful = -(-int(numels.sum()) // _WORTH_A_THREAD)
    job = new_job(sums_of_squares.KINDS, [table, sums], len(table))
    threads.run(sums_of_squares.compile_squares(tensors[0].dtype), job, useful)
    return torch.tensor(sums.sum(), dtype=torch.float64, device="cpu")


def _tables(bucket: Bucket) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``chunks``, ``addresses`` (column 0 the gradients') and ``runs`` as the kernel takes them."""
    chunks = np.stack(cut(bucket.numels, CHUNK), axis=1)
    addresses = np.insert(bucket.addresses, 0, 0, axis=1)
    runs = np.stack([bucket.offsets, bucket.widths, bucket.pitches], axis=1)
    return chunks, addresses, runs
