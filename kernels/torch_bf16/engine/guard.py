"""Whether a plan still fits: it knows all that takes part, in the memory where that was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from operator import attrgetter, eq, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_bf16.sharding import (
    Parameters,
    Shard,
    all_same,
    no_torch_function,
)

__all__ = ["Found", "Guard"]

_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")


@dataclass(frozen=True, slots=True)
class Found:
    """The gradients of a step, one for each member of a plan.

    Attributes:
        gradients: this rank's part of each; None for a member that takes no part.
        addresses: int64, of each, 0 for None; None where a gradient is not contiguous, or negated
            when it is read.
    """

    gradients: Sequence[Tensor | None]
    addresses: np.ndarray | None


class Guard:
    """What parameters, their gradients and their states are now, to compare later.

    Gradients are asked for what torch does not: it lets nobody assign one of another shape or on
    another device than its parameter.

    Args:
        shards: of parameters, most of which have gradients.
        states: the optimizer's state.
        dtypes: of the gradients.

    Attributes:
        taking_part: for each parameter, whether it takes part in the step; another list for another
            set of them.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        states: Mapping[Tensor, Mapping[str, Any]],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        self._shards, self._dtypes = list(shards), list(dtypes)
        self._parameters = [each.parameter for each in shards]
        self._numbers = {id(each): n for n, each in enumerate(self._parameters)}
        own = [states[each] for each in self._parameters]
        self._needed = [tuple(each) for each in own]
        self._kept = _values(own)
        self._compare_with(states, own)
        tensors = [isinstance(each, Tensor) for each in self._kept]
        # Whose state each tensor beside the parameters is.
        owners = chain.from_iterable(repeat(n, len(each)) for n, each in enumerate(own))
        self._owners = [*compress(owners, tensors)]
        self._many = Parameters(self._parameters, [*compress(self._kept, tensors)])
        contiguous = map(Tensor.is_contiguous, self._many.memory)
        self._scattered = [n for n, flag in enumerate(contiguous) if not flag]
        # What the last look found, for the step that follows it and no longer.
        self._found: list[Any] | None = None
        self._addresses: list[int] | None = None
        with no_torch_function():
            self._planned = self._look()
            self._select(self._parameters)
            # Those of other classes have not been checked.
            self._wrappers = self._many.wrappers()

    def holds(
        self, parameters: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Any]]
    ) -> bool:
        """Whether all that take part are known, and all tensors the same in the same memory.

        Args:
            parameters: those with a gradient, in the order of the plan.
            states: the optimizer's state.
        """
        with no_torch_function():
            return (
                self._has_the_same(states)
                and self._many.in_place()
                and self._look() == self._planned
                and self.expect(parameters)
                and self._sees_gradients()
            )

    def expect(self, parameters: Sequence[Tensor]) -> bool:
        """Have some of the parameters take part from now on; whether they all are known."""
        return all_same(parameters, self._gradients.parameters) or self._select(parameters)

    def intact(self, states: Mapping[Tensor, Mapping[str, Any]]) -> list[bool]:
        """For each parameter whether it and its states are what they were, where they were."""
        with no_torch_function():
            if not self._many.in_place():
                return [False] * len(self._parameters)
            *memory, strides, kept = zip(self._look(), self._planned, strict=True)
        found = [*map(all, zip(*(map(eq, *each) for each in memory), strict=True))]
        for owners, (now, then) in ((self._scattered, strides), (self._owners, kept)):
            for owner, one, other in zip(owners, now, then, strict=False):
                found[owner] &= one == other
        kept = iter(self._kept)
        for n, (parameter, names) in enumerate(zip(self._parameters, self._needed, strict=True)):
            own = states.get(parameter, {})
            same = [own.get(name) is next(kept) for name in names]
            found[n] &= all(same)
        return found

    def gradients(self) -> Found:
        """This rank's part of each gradient, which may communicate; for the step that follows."""
        found, addresses = self._found, self._addresses
        self._found = self._addresses = None
        if found is None:
            found = [each.gradient() for each in compress(self._shards, self.taking_part)]
            addresses = _addresses(found)
        if len(found) < len(self.taking_part):
            rest, places = iter(found), iter(addresses or ())
            found = [next(rest) if there else None for there in self.taking_part]
            if addresses is not None:
                addresses = [next(places) if there else 0 for there in self.taking_part]
        return Found(found, None if addresses is None else np.array(addresses, np.int64))

    def versions(self) -> list[int]:
        """For each parameter a number that a write to it raises."""
        return self._many.versions()

    def _compare_with(
        self, states: Mapping[Tensor, Mapping[str, Any]], own: list[Mapping[str, Any]]
    ) -> None:
        # Kept with the objects themselves, so that no id is given away again.
        self._keys, self._states = list(states), list(states.values())
        self._own = own
        self._seen = _values(own)

    def _has_the_same(self, states: Mapping[Tensor, Mapping[str, Any]]) -> bool:
        if (
            all_same(states, self._keys)
            and all_same(states.values(), self._states)
            and all_same(_values(self._own), self._seen)
        ):
            return True
        # Somebody may have added to the states, or put the same tensors into another dict.
        own = [states.get(each, {}) for each in self._parameters]
        pairs = zip(own, self._needed, strict=True)
        found = (its.get(name) for its, names in pairs for name in names)
        if not all(map(is_, found, self._kept)):
            return False
        self._compare_with(states, own)
        return True

    def _select(self, parameters: Sequence[Tensor]) -> bool:
        numbers = [self._numbers.get(id(each)) for each in parameters]
        if None in numbers:
            return False
        chosen = {*numbers}
        self.taking_part = [n in chosen for n in range(len(self._parameters))]
        self._gradients = self._many.gradients(self.taking_part)
        self._expected = [*compress(self._dtypes, self.taking_part)]
        # In another order than the plan's they would be given each other's gradients.
        return all_same(parameters, self._gradients.parameters)

    def _sees_gradients(self) -> bool:
        try:
            found, usable, wrappers = self._gradients.look()
            self._addresses = _addresses(found) if usable else None
        except (AttributeError, RuntimeError):
            # A plain tensor for the gradient of a sharded parameter, or one that is sparse.
            return False
        self._found = found if usable else None
        return [*map(_DTYPE, found)] == self._expected and wrappers <= self._wrappers

    def _look(self) -> tuple[list[Any], ...]:
        """What parameters and states are in memory, in lists that follow those."""
        memory = self._many.memory
        contiguous = [*map(Tensor.is_contiguous, memory)]
        return (
            [*map(Tensor.data_ptr, memory)],
            [*map(_DTYPE, memory)],
            [*map(_SHAPE, memory)],
            contiguous,
            [memory[n].stride() for n in self._scattered],
            # `state["exp_avg"].data = ...` keeps the tensor and frees the memory that kernels know.
            [*map(Tensor.data_ptr, self._many.kept)],
        )


def _addresses(gradients: Sequence[Tensor]) -> list[int] | None:
    # A lazily negated view is contiguous, too, and its memory has the other sign.
    if not all(map(Tensor.is_contiguous, gradients)) or any(map(Tensor.is_neg, gradients)):
        return None
    found = [*map(Tensor.data_ptr, gradients)]
    # A tensor without elements is at 0, too; what else is there has memory of another kind.
    return None if 0 in found and any(map(Tensor.numel, _at_zero(found, gradients))) else found


def _at_zero(addresses: Sequence[int], gradients: Sequence[Tensor]) -> list[Tensor]:
    return [each for each, address in zip(gradients, addresses, strict=True) if not address]


def _values(states: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [*chain.from_iterable([each.values() for each in states])]
