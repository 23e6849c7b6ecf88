"""Whether tensors still are what they were, asked of all of them at once.

At every step a plan asks this of some thousand tensors. One question to all of them in turn, in
loops that Python runs in C, takes half the time of all questions to one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor

__all__ = ["Watch"]

_DTYPE, _SHAPE, _LAYOUT = attrgetter("dtype"), attrgetter("shape"), attrgetter("layout")
_GRADIENT = attrgetter("grad")


class Watch:
    """What contiguous parameters, their gradients and their states are now, to compare later.

    Args:
        parameters: plain contiguous tensors with gradients.
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
        self._planned = self._look()

    @classmethod
    def over(
        cls, parameters: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Any]]
    ) -> Watch | None:
        """A watch, or None where somebody keeps something else than tensors in a state."""
        kept = chain.from_iterable(states[each].values() for each in parameters)
        if not all(isinstance(each, Tensor) for each in kept):
            return None
        return cls(parameters, states)

    def unchanged(
        self, parameters: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Any]]
    ) -> bool:
        """Whether all are the same tensors in the same memory; False also where that is unsure."""
        return (
            _same(parameters, self._parameters)
            and _same(states, self._keys)
            and _same(states.values(), self._values)
            and [*map(tuple, self._own)] == self._names
            and _same(self._flat(), self._tensors)
            and all(map(Tensor.is_contiguous, self._parameters))
            and self._look() == self._planned
        )

    def _flat(self) -> list[Tensor]:
        return [*chain.from_iterable(each.values() for each in self._own)]

    def _look(self) -> tuple[list[Any], ...]:
        parameters, gradients = self._parameters, [*map(_GRADIENT, self._parameters)]
        return (
            [*map(Tensor.data_ptr, parameters)],
            [*map(_DTYPE, parameters)],
            [*map(_SHAPE, parameters)],
            [*map(_DTYPE, gradients)],
            [*map(_SHAPE, gradients)],
            [*map(_LAYOUT, gradients)],
            [*map(Tensor.get_device, gradients)],
            # `state["exp_avg"].data = ...` keeps the tensor and frees the memory that kernels know.
            [*map(Tensor.data_ptr, self._tensors)],
        )


def _same(some: Any, others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
