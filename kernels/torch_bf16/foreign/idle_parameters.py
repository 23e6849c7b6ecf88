"""Parameters without a gradient, in steps of optimizers that may move them all the same.

torch's optimizers leave such a parameter alone. Others, such as those of distributed Muon, take its
gradient for zero: its momentum and its decay go on. Which kind a class is shows in the first step
that could tell; until then, and afterwards if it moves them, its step gets copies of them, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_bf16.sharding import world_size
from torch_bf16.states.views import COUNTER, MASTERS

if TYPE_CHECKING:
    from .optimizer import ForeignOptimizer

__all__ = ["IdleCopy", "IdleKinds", "idle_parameters", "may_move"]

IdleKinds = dict[tuple[int, bool], bool]
"""Whether a step moves parameters without a gradient, by group and by whether they have states."""


def idle_parameters(optimizer: ForeignOptimizer, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parameters without a gradient that the class's own step must see.

    Frozen ones, and those of which this rank holds nothing, are not among them. If there are
    several processes, all others are, and count as moved: a step that divides its work among the
    ranks shows each something else, and they must agree on what it gets and on the noise. All
    others are also among them if the step couples parameters: it may pair them by their places.
    """
    idle = {p for p in parameters if p.grad is None and p.requires_grad and p.numel()}
    return [
        p
        for number, group in enumerate(optimizer.param_groups if idle else ())
        for p in group["params"]
        if p in idle and may_move(optimizer, number, p)
    ]


def may_move(optimizer: ForeignOptimizer, number: int, parameter: Tensor) -> bool:
    """Whether the step must see one of these parameters, in the group of that number."""
    traits = optimizer._engine.traits
    if traits.couples or world_size() > 1:
        return True
    return traits.idle.get(_kind_of(number, dict.get(optimizer.state, parameter, {})), True)


def _kind_of(number: int, state: Mapping[str, Any]) -> tuple[int, bool]:
    """The kind of a parameter, by the number of its group and its state."""
    return number, not state.keys() <= {COUNTER, *MASTERS}


class IdleCopy:
    """A copy of a parameter without a gradient, before a step: whether the step then moves it.

    Args:
        number: the number of its group.
        copy: the copy that the step gets.
        state: the state that the step gets.
    """

    def __init__(self, number: int, copy: nn.Parameter, state: Mapping[str, Any]) -> None:
        self.kind = _kind_of(number, state)
        self._weight, self._state = copy.detach().clone(), _values(state)

    def is_moved(self, copy: nn.Parameter, state: Mapping[str, Any]) -> bool:
        """Whether the step has given it a gradient, or changed its weight or its state.

        Args:
            copy: the copy, after the step.
            state: its state then.
        """
        if copy.grad is not None or self._state.keys() != state.keys():
            return True
        pairs = [(self._weight, copy.detach()), *((self._state[k], state[k]) for k in state)]
        return not all(_equal(before, after) for before, after in pairs)


def _values(state: Mapping[str, Any]) -> dict[str, Any]:
    # A step may write a state's own memory.
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}


def _equal(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape == after.shape and torch.equal(before, after.to(before.device))
    return before is after or (type(before) in (int, float, bool, str) and before == after)
