"""Encodes fp32 numbers, computed elsewhere, into the planes of a weight or a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bf16.formats import Format
from torch_bf16.memory import TransposedOrder, as_it_lies
from torch_bf16.rules import STORE
from torch_bf16.sharding import Span

from .batch import Batch, Task, alike

__all__ = ["Encoder"]


class Encoder:
    """Encodes fp32 numbers into planes; reuses its batches as long as the planes do not move."""

    def __init__(self) -> None:
        self._batches: dict[Any, Batch] = {}
        self._used: dict[Any, Batch] = {}
        self._tasks: list[tuple[Task, Tensor, int]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []

    def add(
        self, format_: Format, planes: Sequence[Tensor], x: Tensor, span: Span, step: int
    ) -> None:
        """Queue ``x``, of any floating-point dtype, to be encoded into this rank's ``planes``.

        Args:
            format_: format of the planes.
            planes: written by :meth:`run`.
            x: as many numbers as ``span`` has elements.
            span: the elements to write; its name and ``step`` key the noise.
            step: number of the draw, 1-based.
        """
        order = _common_order(planes) if planes[0].shape == x.shape == span.shape else None
        lying = [as_it_lies(each, order) for each in planes]
        memory = [each.contiguous() for each in lying]
        self._copies += [
            (old, new)
            for old, new in zip(lying, memory, strict=True)
            if old.data_ptr() != new.data_ptr()
        ]
        x = as_it_lies(x.float(), order).contiguous()
        for part in span.split() if span.numel else ():
            pairs = zip(memory, format_.planes, strict=True)
            part_planes = tuple(part.of(each, plane.block) for each, plane in pairs)
            task = Task(part, STORE, (format_,), (part_planes,), torch.float32, order=order)
            self._tasks.append((task, part.of(x), step))

    def run(self, seed: int, backend: str | None) -> None:
        """Encode everything that was added."""
        queued, copies = self._tasks, self._copies
        self.discard()
        for group in alike(queued, lambda each: each[0].variant):
            tasks, xs, steps = zip(*group, strict=True)
            planes = [
                (task.span, task.order, *(each.data_ptr() for each in task.planes[0]))
                for task in tasks
            ]
            key = (tasks[0].variant, seed, backend, *planes)
            batch = self._batches.get(key) or Batch(tasks, seed, backend)
            self._used[key] = batch
            batch.run_alike(xs, steps)
        for old, new in copies:
            old.copy_(new)

    def discard(self) -> None:
        """Forget everything that was added and not encoded, as after an error."""
        self._tasks, self._copies = [], []

    def finish(self) -> None:
        """End a step: drop the batches that it did not use, so that their planes can be freed."""
        self._batches, self._used = self._used, {}


def _common_order(planes: Sequence[Tensor]) -> TransposedOrder | None:
    """The order in which all planes of a whole tensor lie; None if they lie in no common one."""
    first, *others = planes
    order = TransposedOrder.of(first)
    alike = order is None or all(each.shape == first.shape and order.holds(each) for each in others)
    return order if alike else None
