"""Whether a plan still fits: the same tensors take part, in the same memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor

from torch_bf16.sharding import (
    Parameters,
    Shard,
    all_same,
    no_torch_function,
    unlike_memory,
)

__all__ = ["Guard"]

_DTYPE, _SHAPE, _LAYOUT = attrgetter("dtype"), attrgetter("shape"), attrgetter("layout")


class Guard:
    """What parameters, their gradients and their states are now, to compare later.

    Args:
        shards: of parameters that have gradients.
        states: the optimizer's state.
    """

    def __init__(self, shards: Sequence[Shard], states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        self._shards = list(shards)
        self._parameters = [each.parameter for each in shards]
        own = [states[each] for each in self._parameters]
        self._needed = [tuple(each) for each in own]
        self._kept = _values(own)
        self._compare_with(states, own)
        tensors = [each for each in self._kept if isinstance(each, Tensor)]
        self._many = Parameters(self._parameters, tensors)
        contiguous = map(Tensor.is_contiguous, self._many.memory)
        self._scattered = [n for n, flag in enumerate(contiguous) if not flag]
        # What the last look found, for the step that follows it and no longer.
        self._found: list[Any] | None = None
        with no_torch_function():
            self._planned = self._look()

    def holds(
        self, parameters: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Any]]
    ) -> bool:
        """Whether parameters with a gradient now, and states, are the same in the same memory."""
        with no_torch_function():
            return (
                all_same(parameters, self._parameters)
                and self._has_the_same(states)
                and self._many.in_place()
                and self._sees_the_same()
            )

    def gradients(self) -> list[Tensor]:
        """This rank's part of each gradient, which may communicate; for the step that follows."""
        found, self._found = self._found, None
        if found is None:
            return [each.gradient() for each in self._shards]
        return found

    def versions(self) -> list[int]:
        """For each parameter a number that a write to it raises."""
        return self._many.versions()

    def _compare_with(
        self, states: Mapping[Tensor, Mapping[str, Any]], own: list[Mapping[str, Any]]
    ) -> None:
        # Kept with the objects themselves, so that no id is given away again.
        self._keys, self._states = list(states), list(states.values())
        self._own, self._names = own, [tuple(each) for each in own]
        self._seen = _values(own)

    def _has_the_same(self, states: Mapping[Tensor, Mapping[str, Any]]) -> bool:
        if (
            all_same(states, self._keys)
            and all_same(states.values(), self._states)
            and [*map(tuple, self._own)] == self._names
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

    def _sees_the_same(self) -> bool:
        try:
            return self._look() == self._planned
        except AttributeError:  # a plain tensor for the gradient of a sharded parameter
            return False

    def _look(self) -> tuple[Any, ...]:
        memory = self._many.memory
        gradients, placements = self._many.gradients()
        unsettled, wrappers = unlike_memory(gradients)
        # FSDP2 gives a gradient the placements of its parameter; others must be brought there.
        usable = placements == self._many.placements() and not unsettled and not wrappers
        self._found = gradients if usable else None
        return (
            [*map(Tensor.data_ptr, memory)],
            [*map(_DTYPE, memory)],
            [*map(_SHAPE, memory)],
            [n for n, flag in enumerate(map(Tensor.is_contiguous, memory)) if not flag],
            [memory[n].stride() for n in self._scattered],
            self._many.placements(),
            [*map(_DTYPE, gradients)],
            [*map(_SHAPE, gradients)],
            {*map(_LAYOUT, gradients)},
            [*map(Tensor.get_device, gradients)],
            placements,
            wrappers,
            # `state["exp_avg"].data = ...` keeps the tensor and frees the memory that kernels know.
            [*map(Tensor.data_ptr, self._many.kept)],
        )


def _values(states: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [*chain.from_iterable(each.values() for each in states)]
