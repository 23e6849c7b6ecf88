"""Where many tensors are in memory, and whether they still are there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Addresses"]

# What torch asks of the inputs of a CUDA graph: one call for all. Builds for GPUs alone have it.
_all_at: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


class Addresses:
    """Where some tensors are.

    Attributes:
        numbers: of each its address, 0 where it has no memory; not to be written.
    """

    def __init__(self, numbers: list[int] | None = None) -> None:
        self.numbers = numbers or []
        self._places = [*range(len(self.numbers))]

    @classmethod
    def of(cls, tensors: list[Any]) -> Addresses:
        """Where these are."""
        return cls().now(tensors)

    def now(self, tensors: list[Any]) -> Addresses:
        """Where these are: the same object where it is there, in the same order."""
        same_size = len(tensors) == len(self.numbers)
        if same_size and _all_at is not None and _all_at(tensors, self.numbers, self._places):
            return self
        numbers = [*map(Tensor.data_ptr, tensors)]
        return self if numbers == self.numbers else Addresses(numbers)
