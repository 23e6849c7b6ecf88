"""What a rule is: arithmetic on one element, and the scalars it needs for one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

__all__ = [
    "EXACT",
    "FIRST_MOMENT",
    "GRADIENT",
    "ITERATE",
    "LARGEST_STATISTIC",
    "SECOND_MOMENT",
    "STATISTIC_UNIT",
    "WEIGHTS",
    "Rule",
    "State",
    "lift",
]

WEIGHTS = "weights"
GRADIENT = "gradient"
FIRST_MOMENT = "exp_avg"
SECOND_MOMENT = "exp_avg_sq"
EXACT = "exact"
ITERATE = "iterate"

STATISTIC_UNIT, LARGEST_STATISTIC = 2.0**16, 2.0**14
"""Parts of 1 that a statistic is summed in, and the largest one: of up to 2**33 elements an int64
holds the sum of any, of more where their mean is smaller."""


@dataclass(frozen=True)
class State:
    """One number that a rule keeps per element.

    Attributes:
        name: its key in ``optimizer.state[p]``, as ``torch.optim`` names it.
        role: the recipe's role that decides its format, ``"exp_avg"`` or ``"exp_avg_sq"``;
            ``"exact"`` for one that is fp32 in every recipe, ``"iterate"`` for weights beside the
            weights.
        optional: whether it may be missing after the first step, because an option that needs it
            was switched on later; it then starts at zero.
        shape: of its tensor, from the parameter's, where that is another; then it is fp32.
    """

    name: str
    role: str
    optional: bool = False
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Rule:
    """An update rule.

    Attributes:
        name: unique; part of compiled kernels' names.
        states: the numbers kept per element, in the order ``update`` takes and returns them.
        update: ``update(w, g, states, scalars) -> (w, states)``. Runs on whatever number type the
            backend gives it: fp32 tensors, or fp32 registers. It uses ``+ - *``
            and what :mod:`.arithmetic` has for it, and each number that it returns is the result
            of one of them, so that a NaN among them is a quiet one. It has no literals and never
            combines two scalars: a host would take them as float64 and a kernel as fp32.
        options: ``options(group) -> tuple``: the hyperparameters of a parameter group that
            ``scalars`` needs, flat; numbers or tensors with one element, as the group holds them.
        scalars: ``scalars(options, step, grad_scale) -> tuple``, float64 throughout, from those
            options as floats, the 1-based number of this step, an integer, and what gradients are
            multiplied by. Rounded to fp32 once, by whoever calls. It runs on the host or, lifted,
            on a device, with the same bits: ``+ - *``, comparisons and all of ``arithmetic``, but
            no branch, no ``*`` in a tuple, no ``-x`` of what may be 0 (Triton subtracts it from 0;
            ``x * -1.0``), and a literal is a float where it stands alone.
        role: what ``w`` is: weights, or the sum of gradients. Each has noise of its own.
        stage_states: what the optimizer keeps to make a direction of a whole tensor's gradient,
            which ``update`` then takes for the gradient; not seen by ``update``.
        stage_dims: how many of a tensor's last dimensions make what that is made of: 2 for each
            matrix of a stack by itself, None for the whole tensor.
        statistic: ``statistic(w, g, states, scalars)``: a number of each element, of the same
            arguments and by the same means as ``update``, whose mean over the whole tensor is known
            before ``update`` runs; None where that needs no such mean. At least 0, rounded down to
            a multiple of ``1 / STATISTIC_UNIT``, at most ``LARGEST_STATISTIC``, and that for a NaN:
            a sum of integers has the same bits in any order.
        factor: ``factor(mean)``: what follows from that mean, float64, by the means of ``scalars``;
            ``update`` gets it as the last of its scalars.
    """

    name: str
    states: tuple[State, ...]
    update: Callable[..., Any]
    options: Callable[[Mapping[str, Any]], Sequence[Any]]
    scalars: Callable[[Sequence[Any], int, float], tuple[float, ...]]
    role: str = WEIGHTS
    stage_states: tuple[State, ...] = ()
    stage_dims: int | None = None
    statistic: Callable[..., Any] | None = None
    factor: Callable[[Any], Any] | None = None


def lift(
    function: Any, arithmetic: Mapping[str, Any], compile: Callable[[Any], Any], **names: Any
) -> Any:
    """A rule's function in another dialect.

    Args:
        function: ``update`` or ``scalars`` of a rule; functions of this package that it calls by
            name are lifted with it.
        arithmetic: the dialect's primitives, by their names in :mod:`torch_bf16.rules.arithmetic`.
        compile: applied to each lifted function.
        names: more globals that the dialect needs.
    """
    module = ModuleType("arithmetic")
    vars(module).update(arithmetic)
    scope = {**function.__globals__, **names, "arithmetic": module}
    for name in function.__code__.co_names:
        used = scope.get(name)
        if isinstance(used, FunctionType) and used.__module__.startswith(__package__ or ""):
            scope[name] = lift(used, arithmetic, compile, **names)
    return compile(FunctionType(function.__code__, scope, function.__name__))
