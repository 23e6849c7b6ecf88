"""Buffers over the memory of weights, which a cast would leave with the old numbers.

A program that reads weights without a gradient may keep ``weight.data`` as a buffer, as TD-MPC2
does for the Q functions that its policy learns from. The weight moves the buffer with it, as long
as both have the same memory; a change of dtype gives the weight another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor, nn

from torch_bf16.errors import warn

from .watched_weight import is_plain

__all__ = ["SharedMemory"]


class SharedMemory(NamedTuple):
    """A buffer that is all of a weight's memory, as it was before the weight's dtype changed."""

    buffer: Tensor
    weight: Tensor

    @classmethod
    def of(cls, model: nn.Module, changed: Collection[Tensor]) -> list[SharedMemory]:
        """The buffers that are to share memory with a weight again, once it is cast.

        Warns of one that shares only a part, such as a row in which many weights lie.
        """
        weights = sorted((_span(p), id(p), p) for p in changed if is_plain(p) and p.numel() > 0)
        starts = [start for (start, _), _, _ in weights]
        shared, partly = [], []
        for name, buffer in model.named_buffers() if weights else ():
            if not is_plain(buffer) or buffer.numel() == 0:
                continue
            start, end = _span(buffer)
            found = weights[max(bisect_left(starts, start) - 1, 0) : bisect_left(starts, end)]
            for (_, weight_end), _, weight in found:
                if _layout(weight) == _layout(buffer):
                    shared.append(cls(buffer, weight))
                    break
                if weight_end > start:
                    partly.append(name)
                    break
        if partly:
            warn(
                f"buffer {partly[0]!r} ({len(partly)} in all) shares memory with weights, which "
                "the cast gives memory of their own: it keeps the numbers of before, and does not "
                "follow them any more. Make it after the model is cast, or prepare()d",
            )
        return shared

    def restore(self) -> None:
        """Let the buffer be the weight's memory again."""
        if self.buffer.dtype != self.weight.dtype:
            self.buffer.data = self.weight.data


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses from the first element to behind the last one."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
