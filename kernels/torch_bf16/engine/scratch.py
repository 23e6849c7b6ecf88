"""Memory for contiguous copies of weights that are not contiguous, which kernels need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["Scratch", "in_turns"]

_T = TypeVar("_T")

_ALIGNMENT = 64  # bytes
# Elements copied at once, unless a single weight has more.
_ELEMENTS_AT_ONCE = 1 << 24


class Scratch:
    """Memory that the launches of a plan use in turn, one buffer per device."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, Tensor] = {}

    def copies_of(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous tensors of the weights' shapes and dtypes, not filled; others share them.

        Args:
            weights: tensors on one device.
        """
        device, starts, end = weights[0].device, [], 0
        for each in weights:
            starts.append(end)
            end += -(-each.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < end:
            # Launches that were made before keep the smaller one.
            buffer = self._buffers[device] = torch.empty(end, dtype=torch.uint8, device=device)
        return [
            buffer[start : start + each.nbytes].view(each.dtype).view(each.shape)
            for start, each in zip(starts, weights, strict=True)
        ]


def in_turns(items: Sequence[_T], numel: Callable[[_T], int]) -> list[list[_T]]:
    """Divide weights, of which ``numel`` gives the size, into those that are copied at once."""
    turns: list[list[_T]] = [[]]
    total = 0
    for item in items:
        if turns[-1] and total + numel(item) > _ELEMENTS_AT_ONCE:
            turns.append([])
            total = 0
        turns[-1].append(item)
        total += numel(item)
    return turns
