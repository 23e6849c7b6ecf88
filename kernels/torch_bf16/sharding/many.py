"""Many parameters at once: their memory on this rank, and whether it still is where it was.

At every step a guard asks this of some thousand tensors. One question to all of them in turn, in
loops that Python runs in C, takes half the time of all questions to one after the other, and of
DTensors, whose local tensors are what is asked, a third.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from .local import is_dtensor, local

__all__ = ["Parameters", "all_same", "no_torch_function"]

no_torch_function = torch._C.DisableTorchFunctionSubclass
"""Within it, torch does not look for ``__torch_function__`` at every attribute of a DTensor, which
takes as long as to read it; DTensors have none."""

_GRADIENT, _VERSION = attrgetter("grad"), attrgetter("_version")


class Parameters:
    """Parameters with gradients, plain or sharded, and the tensors kept beside them.

    Args:
        parameters: in the order of the plan.
        beside: the states' tensors.

    Attributes:
        memory: this rank's part of each parameter.
        kept: this rank's part of each tensor beside them.
    """

    def __init__(self, parameters: Sequence[Tensor], beside: Sequence[Tensor] = ()) -> None:
        self._parameters: list[Any] = list(parameters)
        self._flags = [*map(is_dtensor, parameters)]
        self._sharded: list[Any] = [*compress(parameters, self._flags)]
        self._placed: list[Any] = [*filter(is_dtensor, chain(parameters, beside))]
        self._specs = [each._spec for each in self._sharded]
        self._locals = [each._local_tensor for each in self._placed]
        self.memory = [*map(local, parameters)]
        self.kept = [*map(local, beside)]

    def in_place(self) -> bool:
        """Whether DTensors have the local tensors that they had, placed as they were."""
        return all_same([each._local_tensor for each in self._placed], self._locals) and all_same(
            [each._spec for each in self._sharded], self._specs
        )

    def gradients(self) -> tuple[list[Any], list[Any]]:
        """This rank's part of each gradient, and the placements of those that are DTensors.

        Raises:
            AttributeError: a DTensor has a gradient that is none.
        """
        found: list[Any] = [*map(_GRADIENT, self._parameters)]
        if not self._sharded:
            return found, []
        placements = [each._spec.placements for each in compress(found, self._flags)]
        pairs = zip(found, self._flags, strict=True)
        return [each._local_tensor if flag else each for each, flag in pairs], placements

    def placements(self) -> list[Any]:
        """Those of the parameters that are DTensors."""
        return [each.placements for each in self._specs]

    def settled(self, gradients: Sequence[Any]) -> bool:
        """Whether no collective is under way that has still to fill one of these gradients."""
        return not self._sharded or {*map(type, compress(gradients, self._flags))} == {Tensor}

    def versions(self) -> list[int]:
        """Numbers that a write to a parameter raises."""
        with no_torch_function():
            if not self._sharded:
                return [*map(_VERSION, self._parameters)]
            return [
                each._version + each._local_tensor._version if flag else each._version
                for each, flag in zip(self._parameters, self._flags, strict=True)
            ]


def all_same(some: Any, others: list[Any]) -> bool:
    """Whether two collections hold the very same objects, in order."""
    return len(some) == len(others) and all(map(is_, some, others))
