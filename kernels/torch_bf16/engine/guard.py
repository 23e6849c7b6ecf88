"""Whether tensors still are what they were, asked of all of them at once.

At every step a plan asks this of some thousand tensors. One question to all of them in turn, in
loops that Python runs in C, takes half the time of all questions to one after the other; of
DTensors, whose local tensors are what is asked, a third.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from torch_bf16.sharding.dtensor import is_dtensor, local

__all__ = ["Guard", "no_torch_function"]

no_torch_function = torch._C.DisableTorchFunctionSubclass
"""Within it, torch does not look for ``__torch_function__`` at every attribute of a DTensor, which
takes as long as to read it; DTensors have none."""


_DTYPE, _SHAPE, _LAYOUT = attrgetter("dtype"), attrgetter("shape"), attrgetter("layout")
_GRADIENT = attrgetter("grad")


class Guard:
    """What contiguous parameters, their gradients and their states are now, to compare later.

    Args:
        parameters: contiguous tensors of this process, or DTensors over those, with gradients.
        states: the optimizer's state.
    """

    def __init__(
        self, parameters: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Any]]
    ) -> None:
        self._parameters = list(parameters)
        self._own = [states[each] for each in parameters]
        # Kept with the tensors themselves, so that no id is given away again.
        self._keys, self._values = list(states), list(states.values())
        self._names = [tuple(each) for each in self._own]
        self._tensors = self._flat()
        self._is_sharded = [*map(is_dtensor, parameters)]
        self._sharded: list[Any] = [*compress(parameters, self._is_sharded)]
        self._specs = [each._spec for each in self._sharded]
        self._placed: list[Any] = [*filter(is_dtensor, (*parameters, *self._tensors))]
        self._locals = [each._local_tensor for each in self._placed]
        self._memory = [*map(local, parameters)]
        self._kept = [*map(local, self._tensors)]
        # What the last look found, for the step that follows it and no longer.
        self._found: tuple[list[Any], list[Any]] | None = None
        with no_torch_function():
            self._planned = self._look()

    @classmethod
    def over(
        cls, parameters: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Any]]
    ) -> Guard | None:
        """A watch, or None where somebody keeps something else than tensors in a state."""
        kept = chain.from_iterable(states[each].values() for each in parameters)
        if not all(isinstance(each, Tensor) for each in kept):
            return None
        return cls(parameters, states)

    def unchanged(
        self, parameters: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Any]]
    ) -> bool:
        """Whether all are the same tensors in the same memory; False also where that is unsure."""
        with no_torch_function():
            return (
                _same(parameters, self._parameters)
                and _same(states, self._keys)
                and _same(states.values(), self._values)
                and [*map(tuple, self._own)] == self._names
                and _same(self._flat(), self._tensors)
                and self._in_place()
                and self._sees_the_same()
            )

    def _sees_the_same(self) -> bool:
        try:
            return self._look() == self._planned
        except AttributeError:  # a plain tensor for the gradient of a DTensor
            return False

    def gradients(self) -> list[Tensor] | None:
        """This rank's parts, contiguous; None where one must be brought into place or copied."""
        with no_torch_function():
            (gradients, placed), self._found = self._found or self._gradients(), None
            # FSDP2 gives a gradient the very spec of its parameter; of others, placements count.
            specs = [each._spec for each in placed]
            if not _same(specs, self._specs) and _placements(specs) != _placements(self._specs):
                return None
            # What a collective that is still under way leaves there must be waited for.
            if placed and {*map(type, compress(gradients, self._is_sharded))} != {Tensor}:
                return None
            plain = all(map(Tensor.is_contiguous, gradients))
            return gradients if plain and not any(map(Tensor.is_neg, gradients)) else None

    def _gradients(self) -> tuple[list[Any], list[Any]]:
        """What this rank holds of each gradient, and those of them that are DTensors."""
        gradients: list[Any] = [*map(_GRADIENT, self._parameters)]
        placed = [*compress(gradients, self._is_sharded)]
        if placed:
            pairs = zip(gradients, self._is_sharded, strict=True)
            gradients = [each._local_tensor if sharded else each for each, sharded in pairs]
        return gradients, placed

    def _in_place(self) -> bool:
        """Whether DTensors have the local tensors that they had, cut as they were."""
        return (
            _same([each._local_tensor for each in self._placed], self._locals)
            and _same([each._spec for each in self._sharded], self._specs)
            and all(map(Tensor.is_contiguous, self._memory))
        )

    def _flat(self) -> list[Tensor]:
        return [*chain.from_iterable(each.values() for each in self._own)]

    def _look(self) -> tuple[list[Any], ...]:
        memory, self._found = self._memory, self._gradients()
        gradients, placed = self._found
        return (
            [*map(Tensor.data_ptr, memory)],
            [*map(_DTYPE, memory)],
            [*map(_SHAPE, memory)],
            _placements(self._specs),
            [*map(_DTYPE, gradients)],
            [*map(_SHAPE, gradients)],
            [*map(_LAYOUT, gradients)],
            [*map(Tensor.get_device, gradients)],
            _placements([each._spec for each in placed]),
            # `state["exp_avg"].data = ...` keeps the tensor and frees the memory that kernels know.
            [*map(Tensor.data_ptr, self._kept)],
        )


def _placements(specs: list[Any]) -> list[Any]:
    return [each.placements for each in specs]


def _same(some: Any, others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
