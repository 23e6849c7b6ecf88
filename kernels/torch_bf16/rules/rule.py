"""What a rule is: arithmetic on one element, and the scalars it needs for one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FIRST_MOMENT", "SECOND_MOMENT", "Rule", "State"]

FIRST_MOMENT = "exp_avg"
SECOND_MOMENT = "exp_avg_sq"


@dataclass(frozen=True)
class State:
    """One number that a rule keeps per element.

    Attributes:
        name: its key in ``optimizer.state[p]``, as ``torch.optim`` names it.
        role: the recipe's role that decides its format, ``"exp_avg"`` or ``"exp_avg_sq"``.
    """

    name: str
    role: str


@dataclass(frozen=True)
class Rule:
    """An update rule.

    Attributes:
        name: unique; part of compiled kernels' names.
        states: the numbers kept per element, in the order ``update`` takes and returns them.
        update: ``update(w, g, states, scalars) -> (w, states)``. Runs on whatever number type the
            backend gives it: fp32 tensors, or fp32 registers. It uses ``+ - *``,
            ``arithmetic.div`` and ``arithmetic.sqrt`` only, and each number that it returns is the
            result of one of them, so that a NaN among them is a quiet one. It never combines two
            scalars, because a host would do that in float64 and a kernel in fp32.
        scalars: ``scalars(group, step, grad_scale) -> tuple`` in float64, from a parameter group's
            hyperparameters and the 1-based number of this step; rounded to fp32 once, by the plan.
    """

    name: str
    states: tuple[State, ...]
    update: Callable[..., Any]
    scalars: Callable[[Mapping[str, Any], int, float], tuple[float, ...]]
