"""Whether many tensors still have the class, dtype, device, shape and strides that they had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

try:
    # What torch.compile asks of the inputs of a graph: one call for all of them.
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None

__all__ = ["Metadata"]


class Metadata:
    """What some tensors were when they had been looked at one by one.

    Such a look takes several times as long. It knows no tensor, so others may take their places.
    """

    def __init__(self) -> None:
        self._guards: Any = None
        self._useful = TensorGuards is not None

    def note(self, tensors: Sequence[Tensor]) -> None:
        """Remember what these are; not again where what was noted last has never held."""
        if self._useful:
            shapes = [[*each.shape] for each in tensors]
            # The stride of a dimension of size 1 means nothing, and is not always the same.
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
        """Whether these are the same in all that, lazy negation included; False where unknown.

        Args:
            tensors: as many as were noted, in order; what is not a tensor is not the same.
        """
        if self._guards is None or not self._guards.check(*tensors):
            return False
        self._useful = True
        return True
