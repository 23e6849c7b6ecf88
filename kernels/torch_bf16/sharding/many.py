"""Many parameters at once: their memory on this rank, and whether it still is where it was.

At every step a guard checks this for some thousand tensors. Asking all tensors one question at a
time, in loops that Python runs in C, takes half the time of asking one tensor after the other all
questions, and a third for DTensors, whose local tensors are asked.
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
"""Within it, torch does not look for ``__torch_function__`` at every attribute of a DTensor, which
takes as long as to read it; DTensors have none."""

_GRADIENT, _VERSION = attrgetter("grad"), attrgetter("_version")
_NOTHING = torch.empty(0, device="cpu")
_MEMORY = {Tensor}


class Parameters:
    """Parameters, plain or sharded, and the tensors kept beside them.

    Args:
        parameters: in the order of the plan.
        beside: the states' tensors.

    Attributes:
        memory: this rank's part of each parameter.
        state_memory: this rank's part of each tensor beside them.
    """

    def __init__(self, parameters: Sequence[Tensor], beside: Sequence[Tensor] = ()) -> None:
        self._parameters: list[Any] = list(parameters)
        self._flags = [*map(is_dtensor, parameters)]
        self._sharded: list[Any] = [*compress(parameters, self._flags)]
        self._placed: list[Any] = [*filter(is_dtensor, chain(parameters, beside))]
        self._specs = [each._spec for each in self._sharded]
        self._locals = [each._local_tensor for each in self._placed]
        deep = [*map(layers, parameters)]
        # Row by row: the parameters, what is below those that are not memory themselves, and so on.
        self._layers = [*zip_longest(*deep, fillvalue=_NOTHING)] or [()]
        self.memory = [each[-1] for each in deep]
        self._wrapped = [n for n, each in enumerate(deep) if len(each) > 1 + self._flags[n]]
        self.state_memory = [*map(local, beside)]

    def in_place(self) -> bool:
        """Whether DTensors have the local tensors that they had, placed as they were.

        And whether what another library has wrapped is what it was.
        """
        if not self._placed and not self._wrapped:
            return True
        return (
            all_same([each._local_tensor for each in self._placed], self._locals)
            and all_same([each._spec for each in self._sharded], self._specs)
            and all(local(self._parameters[n]) is self.memory[n] for n in self._wrapped)
        )

    def gradients(self) -> tuple[list[Any], bool]:
        """This rank's part of each gradient, None where there is none, as they are in memory.

        Returns:
            The gradients, and whether those of DTensors are placed like these, as FSDP2 leaves
            them.

        Raises:
            AttributeError: a DTensor has a gradient that is none.
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
        """Numbers that a write to a parameter raises."""
        with no_torch_function():
            first, *below = self._layers
            versions = map(_VERSION, first)
            for row in below:
                versions = map(add, versions, map(_VERSION, row))
            return [*versions]

    def sum_of_versions(self) -> int:
        """Their sum, in less time."""
        with no_torch_function():
            return sum(sum(map(_VERSION, row)) for row in self._layers)


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """``.grad`` of each of some parameters."""
    return [*map(_GRADIENT, parameters)]


def all_same(some: Any, others: list[Any]) -> bool:
    """Whether two collections hold the very same objects, in order."""
    return len(some) == len(others) and all(map(is_, some, others))


def unlike_memory(kinds: set[type]) -> tuple[set[type], set[type]]:
    """Of the classes of some gradients, those that are not memory themselves, or may not be.

    Those that a collective still has to fill, and those of other libraries.
    """
    others = kinds - _MEMORY
    unsettled = {each for each in others if hasattr(each, "wait")}
    return unsettled, others - unsettled
