"""Checks that many tensors have kept their class, dtype, device, shape and strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

try:
    # torch.compile checks the inputs of a graph with it: one call for all tensors.
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None

__all__ = ["Metadata"]


class Metadata:
    """Metadata of tensors that were checked one by one, to check them all at once from then on.

    That takes a fraction of the time. No tensor is kept, so others may take their places.
    """

    def __init__(self) -> None:
        self._guards: Any = None
        self._useful = TensorGuards is not None

    def note(self, tensors: Sequence[Tensor]) -> None:
        """Record the metadata of these tensors, unless the last record has never matched."""
        if self._useful:
            shapes = [[*each.shape] for each in tensors]
            # The stride of a dimension of size 1 means nothing and may change.
            strides = [
                [
                    step if size > 1 else None
                    for size, step in zip(shape, each.stride(), strict=True)
                ]
                for shape, each in zip(shapes, tensors, strict=True)
            ]
            guards: Any = TensorGuards
            self._guards = guards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
            self._useful = False

    def holds(self, tensors: Sequence[Any]) -> bool:
        """Whether tensors match the record, lazy negation included; False without a record.

        Args:
            tensors: as many as were recorded, in order; anything but a tensor does not match.
        """
        if self._guards is None or not self._guards.check(*tensors):
            return False
        self._useful = True
        return True
