"""Running the kernel over all chunks of a bucket: its tables, and one launch.

``chunks``, int32 ``[chunks, 2]``, has the tensor of each chunk and the chunk's number in it.
``tensors``, int64, has a row for each tensor: number of elements, global index of the first one,
two words for each noise stream in use, the addresses of the planes of each number, if the rule has
a statistic, the address of its sum and the number of elements of the whole tensor, and unless the
variant's indices are consecutive, width and pitch. ``gradients``, int64 ``[n, 2]``, has for each
tensor the gradient's address, or 0 if there is none, and the row of the tensor's scalars in
``ScalarRows.table``. The first two tables are uploaded once, the third when it has changed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from torch_bf16.backends.bucket import Bucket
from torch_bf16.backends.inputs import KernelInputs, ScalarRows
from torch_bf16.backends.pieces import cut

from .kernel import CHUNK, constants, options, step
from .launcher import launcher
from .statistic import measure, measure_constants
from .tables import Table, on, upload

__all__ = ["TritonKernel"]

_NOT_MEASURED: tuple[ScalarRows | None, np.ndarray | None] = None, None


class TritonKernel:
    """The compiled kernel of a variant, bound to a bucket. A call does not wait for the device.

    Args:
        bucket: the tensors to update.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self._device = bucket, bucket.variant.device
        self._rows = _rows(bucket)
        chunks = _chunks(bucket)
        self._programs, self._chunks = len(chunks), upload(chunks, self._device)
        self._tensors = upload(self._rows, self._device)
        self._tensors_with_bases, self._gradients = Table(self._device), Table(self._device)
        self._gradient_rows = np.empty((0, 2), np.int64)
        self._made_from: tuple[np.ndarray, np.ndarray] | None = None
        self._tables: tuple[Tensor, ...] = ()
        self._launch: Callable[..., None] | None = None
        self._sum: Callable[..., None] | None = None
        # What was brought to measure, and not updated yet.
        self._measured = _NOT_MEASURED

    def __call__(self, inputs: KernelInputs) -> None:
        """Update every tensor of the bucket, in place."""
        (scalars, addresses), self._measured = self._measured, _NOT_MEASURED
        # A second copy of the same tables would be part of a CUDA graph, too.
        if addresses is None or not (
            scalars is inputs.scalars and addresses is inputs.given_addresses
        ):
            self.bring(inputs)
        self.launch()

    def measure(self, inputs: KernelInputs) -> None:
        """Add the statistic of each tensor to the bucket's sums."""
        self.bring(inputs)
        self.launch_measure()
        self._measured = inputs.scalars, inputs.given_addresses

    def bring(self, inputs: KernelInputs) -> None:
        """Upload the inputs of the next :meth:`launch`.

        A CUDA graph that holds only the launch uses, at each replay, the inputs uploaded last.
        """
        if self._programs == 0:
            return
        scalars = inputs.scalars
        table, rows = scalars.table, scalars.rows
        if isinstance(table, np.ndarray):
            table, rows = self._upload_scalars(scalars, table), np.arange(len(rows))
        if self._launch is None:
            self.compile(table.shape[1] - 2)
        tensors = self._tensors if inputs.bases is None else self._tensors_of(inputs.bases)
        gradients = self._gradients.of(self._gradient_table(inputs.addresses, rows))
        self._tables = self._chunks, tensors, gradients, table

    def launch(self) -> None:
        """Update every tensor of the bucket, using the tables on the device."""
        if self._launch is not None:
            with on(self._device):
                self._launch(*self._tables)

    def launch_measure(self) -> None:
        """Add each tensor's statistic to the sums, using the tables on the device."""
        if self._sum is not None:
            with on(self._device):
                self._sum(*self._tables)

    def compile(self, n_scalars: int) -> None:
        """Compile the kernel, or read it from Triton's cache, and load it onto the device."""
        if self._programs == 0:
            return
        variant, chip = self._bucket.variant, _architecture(self._device)
        tables = torch.int32, torch.int64, torch.int64, torch.float32
        programs = self._programs
        if variant.rule.statistic is not None:
            fixed = measure_constants(variant, n_scalars, chip)
            how = options(variant, n_scalars, chip)
            self._sum = launcher(measure, tables, programs, fixed, how, self._device)
            n_scalars += 1
        fixed, how = constants(variant, n_scalars, chip), options(variant, n_scalars, chip)
        self._launch = launcher(step, tables, programs, fixed, how, self._device)

    def _gradient_table(self, addresses: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The table ``gradients``; the same array as last time for the same two arrays."""
        if (
            self._made_from is None
            or self._made_from[0] is not addresses
            or self._made_from[1] is not rows
        ):
            self._gradient_rows = np.empty((len(rows), 2), np.int64)
            self._gradient_rows[:, 0], self._gradient_rows[:, 1] = addresses, rows
            self._made_from = addresses, rows
        return self._gradient_rows

    def _tensors_of(self, bases: np.ndarray) -> Tensor:
        """The table ``tensors`` with the noise words of other bases."""
        words = _words(bases)
        changed = self._rows.copy()
        changed[:, 2 : 2 + words.shape[1]] = words
        return self._tensors_with_bases.of(changed)

    def _upload_scalars(self, scalars: ScalarRows, table: np.ndarray) -> Tensor:
        """Upload the host's scalars in the layout that the device uses."""
        steps = np.asarray(scalars.steps)
        columns = [table[scalars.rows], steps[:, None], np.zeros((len(steps), 1))]
        return upload(np.concatenate(columns, axis=1).astype(np.float32), self._device)


def _architecture(device: torch.device) -> int | str:
    if knobs.runtime.interpret:
        return 0
    with on(device):
        return driver.active.get_current_target().arch  # pyright: ignore[reportAttributeAccessIssue]


def _chunks(bucket: Bucket) -> np.ndarray:
    tensors, starts = cut(bucket.numels, CHUNK)
    return np.stack([tensors, starts // CHUNK], axis=1).astype(np.int32)


def _rows(bucket: Bucket) -> np.ndarray:
    """The table ``tensors``."""
    variant = bucket.variant
    sizes = np.stack([bucket.numels, bucket.offsets], axis=1)
    runs = np.stack([bucket.widths, bucket.pitches], axis=1)
    runs = runs[:, : 2 * (variant.indices != "consecutive")]
    words, totals = _words(bucket.bases), np.empty((len(sizes), 0), np.int64)
    if bucket.totals is not None:
        places = bucket.totals.sums.data_ptr() + 8 * bucket.totals.places
        totals = np.stack([places, bucket.totals.counts], axis=1)
    return np.concatenate([sizes, words, bucket.addresses, totals, runs], axis=1)


def _words(bases: np.ndarray) -> np.ndarray:
    """For each tensor, the two base words of each noise stream."""
    return bases.reshape(len(bases), 2 * bases.shape[1]).astype(np.int64)
