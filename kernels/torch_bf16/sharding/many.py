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

    def gradients(self, chosen: Sequence[bool]) -> Gradients:
        """The gradients of some of the parameters, to be looked at in each step."""
        parameters = [*compress(self._parameters, chosen)]
        return Gradients(parameters, [*compress(self._flags, chosen)])

    def versions(self) -> list[int]:
        """Numbers that a write to a parameter raises."""
        with no_torch_function():
            if not self._sharded:
                return [*map(_VERSION, self._parameters)]
            return [
                each._version + each._local_tensor._version if flag else each._version
                for each, flag in zip(self._parameters, self._flags, strict=True)
            ]


class Gradients:
    """The gradients of parameters that all have one.

    Args:
        parameters: in the order of the plan.
        flags: whether each is a DTensor.

    Attributes:
        parameters: the same.
    """

    def __init__(self, parameters: list[Any], flags: list[bool]) -> None:
        self.parameters, self._flags = parameters, flags
        sharded = [*compress(parameters, flags)]
        self._specs = [each._spec for each in sharded]
        self._shapes = [each._local_tensor.shape for each in sharded]

    def look(self) -> tuple[list[Any], bool]:
        """This rank's part of each, and whether they can be read as they are.

        They can where they are placed like their parameters, as FSDP2 leaves them, and no
        collective is under way that has still to fill one of them.

        Raises:
            AttributeError: a DTensor has a gradient that is none.
        """
        found: list[Any] = [*map(_GRADIENT, self.parameters)]
        if not self._specs:
            return found, True
        placed = [*compress(found, self._flags)]
        pairs = zip(found, self._flags, strict=True)
        found = [each._local_tensor if flag else each for each, flag in pairs]
        usable = (
            [each._spec.placements for each in placed] == [each.placements for each in self._specs]
            and {type(each._local_tensor) for each in placed} == {Tensor}
            and [each._local_tensor.shape for each in placed] == self._shapes
        )
        return found, usable


def all_same(some: Any, others: list[Any]) -> bool:
    """Whether two collections hold the very same objects, in order."""
    return len(some) == len(others) and all(map(is_, some, others))
