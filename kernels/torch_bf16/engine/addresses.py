"""The addresses of many tensors, and whether they have changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Addresses"]

# torch checks the inputs of CUDA graphs with it: one call for all tensors. Only GPU builds have it.
_all_at: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


class Addresses:
    """The addresses of some tensors.

    Attributes:
        values: the address of each tensor, 0 if it has no memory; not to be written.
    """

    def __init__(self, values: list[int] | None = None) -> None:
        self.values = values or []
        self._places = [*range(len(self.values))]

    @classmethod
    def of(cls, tensors: list[Any]) -> Addresses:
        """The addresses of these tensors."""
        return cls().now(tensors)

    def now(self, tensors: list[Any]) -> Addresses:
        """The addresses of these tensors: this object if they are equal to its own, in order."""
        same_size = len(tensors) == len(self.values)
        if same_size and _all_at is not None and _all_at(tensors, self.values, self._places):
            return self
        values = [*map(Tensor.data_ptr, tensors)]
        return self if values == self.values else Addresses(values)
