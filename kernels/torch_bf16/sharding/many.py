"""The memory of many parameters on this rank, and whether it has moved.

A guard checks this for thousands of tensors at every step. Reading one attribute of all tensors
before the next attribute, in loops that Python runs in C, takes half the time of reading all
attributes of one tensor after the other, and a third of it for the local tensors of DTensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress, zip_longest
from operator import add, attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from .local import is_dtensor, layers, local

__all__ = ["Parameters", "all_same", "gradients_of", "no_torch_function", "unlike_memory"]

no_torch_function = torch._C.DisableTorchFunctionSubclass
"""Keeps torch from looking for ``__torch_function__`` at each attribute of a DTensor: DTensors have
none, and the look-up takes as long as reading the attribute."""

_GRADIENT, _VERSION = attrgetter("grad"), attrgetter("_version")
_NOTHING = torch.empty(0, device="cpu")
_MEMORY = {Tensor}


class Parameters:
    """Parameters, plain or sharded, and the tensors of their states.

    Args:
        parameters: in the order of the plan.
        beside: the tensors of the states.

    Attributes:
        memory: this rank's part of each parameter.
        state_memory: this rank's part of each tensor of the states.
    """

    def __init__(self, parameters: Sequence[Tensor], beside: Sequence[Tensor] = ()) -> None:
        self._parameters: list[Any] = list(parameters)
        self._flags = [*map(is_dtensor, parameters)]
        self._sharded: list[Any] = [*compress(parameters, self._flags)]
        self._placed: list[Any] = [*filter(is_dtensor, chain(parameters, beside))]
        self._specs = [each._spec for each in self._sharded]
        self._locals = [each._local_tensor for each in self._placed]
        deep = [*map(layers, parameters)]
        # The first row has the parameters, the next one what wrappers among them wrap, and so on.
        self._layers = [*zip_longest(*deep, fillvalue=_NOTHING)] or [()]
        self.memory = [each[-1] for each in deep]
        self._wrapped = [n for n, each in enumerate(deep) if len(each) > 1 + self._flags[n]]
        self.state_memory = [*map(local, beside)]

    def in_place(self) -> bool:
        """Whether DTensors still have the same local tensors and placements.

        And whether the wrappers of other libraries still wrap the same tensors.
        """
        if not self._placed and not self._wrapped:
            return True
        return (
            all_same([each._local_tensor for each in self._placed], self._locals)
            and all_same([each._spec for each in self._sharded], self._specs)
            and all(local(self._parameters[n]) is self.memory[n] for n in self._wrapped)
        )

    def gradients(self) -> tuple[list[Any], bool]:
        """This rank's part of each gradient as it is in memory; None for a missing gradient.

        Returns:
            The gradients, and whether the gradient of each DTensor has its placements, as FSDP2
            leaves it.

        Raises:
            AttributeError: the gradient of a DTensor is not a DTensor.
        """
        gradients: list[Any] = [*map(_GRADIENT, self._parameters)]
        if not self._sharded:
            return gradients, True
        pairs = zip(gradients, self._flags, strict=True)
        placed = [each for each, flag in pairs if flag and each is not None]
        here = self._sharded
        if len(placed) < len(here):
            here = [each for each in here if each.grad is not None]
        pairs = zip(gradients, self._flags, strict=True)
        gradients = [g._local_tensor if flag and g is not None else g for g, flag in pairs]
        fitting = [each._spec.placements for each in placed] == [
            each._spec.placements for each in here
        ] and [each._local_tensor.shape for each in placed] == [
            each._local_tensor.shape for each in here
        ]
        return gradients, fitting

    def versions(self) -> list[int]:
        """The version of each parameter, which torch raises at every write to it."""
        with no_torch_function():
            first, *below = self._layers
            versions = map(_VERSION, first)
            for row in below:
                versions = map(add, versions, map(_VERSION, row))
            return [*versions]

    def sum_of_versions(self) -> int:
        """The sum of :meth:`versions`, which takes less time."""
        with no_torch_function():
            return sum(sum(map(_VERSION, row)) for row in self._layers)


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """``.grad`` of each parameter."""
    return [*map(_GRADIENT, parameters)]


def all_same(some: Any, others: list[Any]) -> bool:
    """Whether two collections hold the very same objects, in order."""
    return len(some) == len(others) and all(map(is_, some, others))


def unlike_memory(kinds: set[type]) -> tuple[set[type], set[type]]:
    """The classes of gradients that are not plain tensors.

    Args:
        kinds: classes of gradients.

    Returns:
        Classes of tensors that a collective still has to fill, and wrappers of other libraries.
    """
    others = kinds - _MEMORY
    unsettled = {each for each in others if hasattr(each, "wait")}
    return unsettled, others - unsettled
