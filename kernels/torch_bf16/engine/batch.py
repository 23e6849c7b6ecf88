"""Numbers that one kernel call takes through a rule: the only way from tensors to a backend.

Steps, running averages, sums of micro-batches and the encoding for other optimizers are batches. A
batch is fixed when it is made; the inputs of each step come with :meth:`Batch.run`. If the tensors
themselves change from time to time, :meth:`Batch.move` rebinds it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from torch_bf16.backends import (
    Backend,
    Bucket,
    Kernel,
    KernelInputs,
    ScalarRows,
    StagedKernel,
    Totals,
    Variant,
    choose_for,
    load,
)
from torch_bf16.formats import Format
from torch_bf16.rules import Rule
from torch_bf16.sharding import Span

__all__ = ["Batch", "Job", "alike"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Job:
    """One tensor, or one span of it, on its way through a rule.

    Attributes:
        span: which elements of the whole tensor they are; its name keys the noise.
        rule: the rule.
        formats: of the number that the rule updates, then of each of its states.
        planes: for each format its tensors, contiguous and written by each run; the span's part.
        gradient_dtype: of what a run brings, bfloat16 or float32.
        device: where a run brings it, and computes; planes may be in host memory beside that. None
            for where the first of them is.
    """

    span: Span
    rule: Rule
    formats: tuple[Format, ...]
    planes: tuple[tuple[Tensor, ...], ...]
    gradient_dtype: torch.dtype
    device: torch.device | None = None

    @property
    def variant(self) -> Variant:
        """What the kernel for it is compiled for."""
        device = self.device or self.planes[0][0].device
        return Variant(self.rule, self.formats, self.gradient_dtype, device, self.span.strided)


def alike(items: Iterable[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """Items grouped by key, such as jobs of one variant, which one batch can take."""
    found: dict[Hashable, list[_T]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return list(found.values())


class Batch:
    """Jobs of one variant, and the kernel that takes them all in one call.

    Args:
        jobs: at least one, of one variant.
        seed: of the noise.
        backend: what runs it; None for the best that works on the device.
        totals: where the rule's statistic is summed, if it has one; None where each job is a whole
            tensor.

    Attributes:
        backend: what runs it.
        variant: what its kernel is compiled for.
        bases: uint32 ``[jobs, streams, 2]``: what the noise of each stream starts from.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        seed: int,
        backend: Backend | str | None = None,
        totals: Totals | None = None,
    ) -> None:
        self.variant = variant = jobs[0].variant
        if backend is None or isinstance(backend, str):
            backend = choose_for(variant, backend)
        self.backend = backend
        spans = [job.span for job in jobs]
        bucket = Bucket.of(
            variant,
            [job.planes for job in jobs],
            [(span.numel, span.offset, span.width, span.pitch) for span in spans],
            [span.name for span in spans],
            seed,
            totals,
        )
        self.bases = bucket.bases
        self._first_row = np.zeros(len(jobs), np.int64)
        self._kernel: Kernel | None = load(bucket, backend)
        # Without the tensors, which another kernel may replace.
        self._bucket = replace(bucket, planes=())

    def __len__(self) -> int:
        return len(self.bases)

    @property
    def staged(self) -> bool:
        """Whether planes are in host memory, and pass through the device's for each run."""
        return isinstance(self._kernel, StagedKernel)

    def compile(self, n_scalars: int) -> None:
        """Compile the kernel now, for a rule with so many scalars, and not at its first run."""
        self._bound.compile(n_scalars)

    def move(self, planes: Sequence[Sequence[tuple[Tensor, ...]]] | None) -> None:
        """Replace the jobs' tensors by others of the same dtype, size and device.

        Args:
            planes: for each job those of each format; None drops the present ones, so that they can
                be freed before others come.
        """
        moved = None if planes is None else replace(self._bucket, planes=planes)
        self._kernel = None if moved is None else load(moved, self.backend)

    def run(
        self,
        gradients: Sequence[Tensor | None],
        scalars: ScalarRows,
        bases: np.ndarray | None = None,
        addresses: np.ndarray | None = None,
    ) -> None:
        """Update the planes of all jobs.

        Args:
            gradients: one for each job, contiguous; None leaves that job's planes as they are.
            scalars: of the rule, and the number of the step.
            bases: what the noise starts from instead of :attr:`bases`.
            addresses: of the gradients, int64, 0 for None, if known; an array that is not written
                afterwards, because the same array is taken for the same numbers.
        """
        self._bound(KernelInputs(gradients, scalars, bases, addresses))

    def measure(
        self,
        gradients: Sequence[Tensor | None],
        scalars: ScalarRows,
        addresses: np.ndarray | None = None,
    ) -> None:
        """Add each job's part of the rule's statistic to its sum, before :meth:`run`.

        Args as for :meth:`run`.
        """
        self._bound.measure(KernelInputs(gradients, scalars, None, addresses))

    def bring(
        self, gradients: Sequence[Tensor | None], scalars: ScalarRows, addresses: np.ndarray
    ) -> None:
        """Copy to the device what :meth:`launch` will work on; for capturable backends.

        Args as for :meth:`run`.
        """
        kernel: Any = self._kernel
        kernel.bring(KernelInputs(gradients, scalars, None, addresses))

    def launch_measure(self) -> None:
        """:meth:`measure` by what :meth:`bring` brought."""
        kernel: Any = self._kernel
        kernel.launch_measure()

    def launch(self) -> None:
        """Update the planes of all jobs by what :meth:`bring` brought."""
        kernel: Any = self._kernel
        kernel.launch()

    def run_alike(
        self,
        gradients: Sequence[Tensor | None],
        step: int | Sequence[int],
        options: tuple[float, ...] = (),
        *,
        scale: float = 1.0,
        bases: Any = None,
    ) -> None:
        """:meth:`run` with the same options for all jobs, for rules whose scalars ignore the step.

        Args:
            gradients: as for :meth:`run`.
            step: its number, or one for each job; the noise is keyed by it.
            options: the rule's.
            scale: multiplied into the gradients.
            bases: as for :meth:`run`.
        """
        table = np.array([self.variant.rule.scalars(options, 1, scale)], np.float64)
        n = len(self)
        steps = np.full(n, step, np.int64) if isinstance(step, int) else np.array(step, np.int64)
        self.run(gradients, ScalarRows(steps, self._first_row, table.astype(np.float32)), bases)

    @property
    def _bound(self) -> Kernel:
        if self._kernel is None:
            raise RuntimeError("the batch has no tensors; move() it to some before it runs")
        return self._kernel
