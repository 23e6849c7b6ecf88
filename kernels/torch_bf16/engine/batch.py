"""Tensors that one kernel call updates by a rule: the only way from tensors to a backend.

Steps, running averages, sums of micro-batches and the encoding for other optimizers all run as
batches. A batch is fixed when it is made; :meth:`Batch.run` takes the inputs of each step. If the
tensors are replaced later, :meth:`Batch.move` binds it to the new ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from torch_bf16.backends import (
    Backend,
    Bucket,
    CapturableKernel,
    Kernel,
    KernelInputs,
    Run,
    ScalarRows,
    StagedKernel,
    Totals,
    Variant,
    choose_for,
    cuda_graphs,
    load,
)
from torch_bf16.formats import Format
from torch_bf16.memory import TransposedOrder
from torch_bf16.rules import Rule
from torch_bf16.sharding import Span

__all__ = ["Batch", "Task", "alike"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Task:
    """One tensor, or one span of a tensor, for a rule to update.

    Attributes:
        span: which elements of the whole tensor to update; its name keys the noise.
        rule: the update rule.
        formats: the format of the number that the rule updates, then those of its states.
        planes: for each format, the span's part of its planes: contiguous, written by each run.
        gradient_dtype: dtype of the gradients that runs pass, bfloat16 or float32.
        device: where gradients are and the kernel runs, even if planes are in host memory. None
            for the device of the first plane.
        order: the order of the elements in planes and gradients, which are contiguous all the same
            (:func:`torch_bf16.memory.as_it_lies`), if the whole tensor lies so; the span's offset
            is then its place in that memory. None for row-major order.
    """

    span: Span
    rule: Rule
    formats: tuple[Format, ...]
    planes: tuple[tuple[Tensor, ...], ...]
    gradient_dtype: torch.dtype
    device: torch.device | None = None
    order: TransposedOrder | None = None

    @property
    def variant(self) -> Variant:
        """What the task's kernel is compiled for."""
        indices = "transposed" if self.order else "strided" if self.span.strided else "consecutive"
        # An element's place is nothing to a kernel that draws no noise.
        if not any(each.stochastic for each in self.formats):
            indices = "consecutive"
        device = self.device or self.planes[0][0].device
        return Variant(self.rule, self.formats, self.gradient_dtype, device, indices)

    @property
    def run(self) -> Run:
        """Where its elements are in the whole tensor, as a bucket has it."""
        span, order = self.span, self.order
        if order is None:
            return span.numel, span.offset, span.width, span.pitch
        return span.numel, span.offset, order.columns, order.rows


def alike(items: Iterable[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """Group items by key: tasks by variant, say, so that each group can be one batch."""
    groups: dict[Hashable, list[_T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())


class Batch:
    """Tasks of one variant, and the kernel that updates them all in one call.

    Args:
        tasks: at least one task, all of one variant.
        seed: seed of the noise.
        backend: a backend or its name; None for the best that works on the device.
        totals: where the rule's statistic is summed, if it has one; None if each task is a whole
            tensor.

    Attributes:
        backend: the backend that runs the kernel.
        variant: what the kernel is compiled for.
        bases: uint32 ``[tasks, streams, 2]``: what the noise of each stream starts from.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        backend: Backend | str | None = None,
        totals: Totals | None = None,
    ) -> None:
        self.variant = variant = tasks[0].variant
        if backend is None or isinstance(backend, str):
            backend = choose_for(variant, backend)
        self.backend = backend
        bucket = Bucket.of(
            variant,
            [task.planes for task in tasks],
            [task.run for task in tasks],
            [task.span.name for task in tasks],
            seed,
            totals,
        )
        self.bases = bucket.bases
        self._first_row = np.zeros(len(tasks), np.int64)
        self._kernel: Kernel | None = load(bucket, backend)
        # Without the planes, which move() may replace.
        self._bucket = replace(bucket, planes=())

    def __len__(self) -> int:
        return len(self.bases)

    @property
    def staged(self) -> bool:
        """Whether planes are in host memory and pass through device buffers in each run."""
        return isinstance(self._kernel, StagedKernel)

    def compile(self, n_scalars: int) -> None:
        """Compile the kernel now, for a rule with ``n_scalars`` scalars, not at its first run."""
        self._bound.compile(n_scalars)

    def move(self, planes: Sequence[Sequence[tuple[Tensor, ...]]] | None) -> None:
        """Replace the tasks' planes by tensors of the same dtype, size and device.

        Args:
            planes: for each task, the planes of each format; None drops the current ones, so that
                they can be freed before new ones are allocated.
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
        """Update the planes of all tasks.

        Args:
            gradients: one for each task, contiguous; None leaves that task's planes as they are.
            scalars: the rule's scalars, and the number of the step.
            bases: what the noise starts from, in place of :attr:`bases`.
            addresses: addresses of the gradients, if known: int64, 0 for None. Never write to this
                array afterwards: an identical array object is assumed to hold the same numbers.
        """
        self._bound(KernelInputs(gradients, scalars, bases, addresses))

    def measure(
        self,
        gradients: Sequence[Tensor | None],
        scalars: ScalarRows,
        addresses: np.ndarray | None = None,
    ) -> None:
        """Add each task's part of the rule's statistic to its total; call it before :meth:`run`.

        Args as for :meth:`run`.
        """
        self._bound.measure(KernelInputs(gradients, scalars, None, addresses))

    def bring(
        self, gradients: Sequence[Tensor | None], scalars: ScalarRows, addresses: np.ndarray
    ) -> None:
        """Copy the inputs of :meth:`launch` to the device; for capturable backends.

        Args as for :meth:`run`.
        """
        self._capturable.bring(KernelInputs(gradients, scalars, None, addresses))

    def launch_measure(self) -> None:
        """Run :meth:`measure` on the inputs that :meth:`bring` copied."""
        self._capturable.launch_measure()

    def launch(self) -> None:
        """Update the planes of all tasks from the inputs that :meth:`bring` copied."""
        self._capturable.launch()

    def run_alike(
        self,
        gradients: Sequence[Tensor | None],
        step: int | Sequence[int],
        options: tuple[float, ...] = (),
        *,
        scale: float = 1.0,
        bases: Any = None,
    ) -> None:
        """:meth:`run` with the same options for all tasks, for rules whose scalars ignore the step.

        Args:
            gradients: as for :meth:`run`.
            step: number of the step, which keys the noise: one for all tasks, or one for each.
            options: the rule's options.
            scale: factor of the gradients.
            bases: as for :meth:`run`.

        Raises:
            RuntimeError: a CUDA graph is being captured; nothing has been updated.
        """
        if cuda_graphs.capturing([self.variant.device]):
            # Replays would also copy the scalars from host memory that has other contents then.
            raise RuntimeError(
                "a CUDA graph cannot record an update whose number the host counts, such as that "
                "of an average of weights, a mean over ranks in bf16, or set_exact_weight(): every "
                "replay would draw the same noise. Do it outside of the capture"
            )
        table = np.array([self.variant.rule.scalars(options, 1, scale)], np.float64)
        n = len(self)
        steps = np.full(n, step, np.int64) if isinstance(step, int) else np.array(step, np.int64)
        self.run(gradients, ScalarRows(steps, self._first_row, table.astype(np.float32)), bases)

    @property
    def _bound(self) -> Kernel:
        if self._kernel is None:
            raise RuntimeError("the batch has no tensors; move() it to some before it runs")
        return self._kernel

    @property
    def _capturable(self) -> CapturableKernel:
        return cast(CapturableKernel, self._bound)
