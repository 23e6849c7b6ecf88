"""What a rule is: arithmetic on one element, and the scalars it needs for one step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Number
from types import CodeType, FunctionType, ModuleType
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
"""A statistic is summed in units of ``1 / STATISTIC_UNIT``, and is at most ``LARGEST_STATISTIC``:
an int64 holds the sum of fewer than 2**33 such numbers, and of more if their mean is smaller."""


@dataclass(frozen=True)
class State:
    """One number that a rule keeps per element.

    Attributes:
        name: its key in ``optimizer.state[p]``, as ``torch.optim`` names it.
        role: the recipe's role that decides its format, ``"exp_avg"`` or ``"exp_avg_sq"``;
            ``"exact"`` for a state that is fp32 in every recipe, ``"iterate"`` for a second
            sequence of weights beside the weights.
        optional: whether it may be missing after the first step, because an option that needs it
            was switched on later; it then starts at zero.
        shape: computes the shape of its tensor from the parameter's, if they differ; the state is
            then fp32.
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
            backend passes: fp32 tensors, or fp32 registers. It uses only ``+ - *`` and the
            functions of :mod:`.arithmetic` that are meant for it, and each number that it returns
            is the result of one of these, so that every NaN is a quiet one. It has no literals and
            never combines two scalars: a host would do so in float64 and a kernel in fp32.
        options: ``options(group) -> tuple``: the hyperparameters of a parameter group that
            ``scalars`` needs, flat; numbers or tensors with one element, as the group holds them.
        scalars: ``scalars(options, step, grad_scale) -> tuple``, float64 throughout, from those
            options as floats, the 1-based number of this step, an integer, and the factor that
            gradients are multiplied by. The caller rounds them to fp32, once. It runs on the host
            or, lifted, on a device, with the same bits. It may use ``+ - *``, comparisons and the
            functions of :mod:`.arithmetic` that are meant for it, but no branch, no ``*`` in a
            tuple, and no ``-x`` if ``x`` may be 0 (Triton subtracts it from 0; write
            ``x * -1.0``); a literal that stands alone is a float.
        role: what ``w`` is: weights, a moment, or the sum of gradients. Each has its own noise.
        stage_states: the states that the optimizer needs to turn the gradient of a whole tensor
            into a direction, which replaces the gradient in ``update``; ``update`` does not see
            these states.
        stage_dims: how many of a tensor's last dimensions a direction is computed from: 2 for each
            matrix of a stack separately, None for the whole tensor.
        statistic: ``statistic(w, g, states, scalars)``: a number for each element, with the same
            arguments and operations as ``update``, whose mean over the whole tensor is known before
            ``update`` runs; None if ``update`` needs no such mean. It is at least 0. Backends cap
            it at ``LARGEST_STATISTIC``, which also replaces a NaN, and round it down to a multiple
            of ``1 / STATISTIC_UNIT``: a sum of integers has the same bits in any order.
        factor: ``factor(mean)``: a number computed from that mean in float64, by the operations of
            ``scalars``; ``update`` gets it as the last of its scalars.
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

    @functools.cached_property
    def identifier(self) -> str:
        """The name; of a rule from outside this package with a hash of its code.

        What is kept on disk of other rules is found by the sources of this package.
        """
        functions = self.update, self.scalars, self.statistic, self.factor
        if all(each is None or _is_ours(each) for each in functions):
            return self.name
        seen: set[int] = set()
        facts = "".join(fact for each in functions for fact in _facts(each, seen))
        return f"{self.name}_{blake2b(facts.encode(), digest_size=8).hexdigest()}"


def lift(
    function: Any, arithmetic: Mapping[str, Any], compile: Callable[[Any], Any], **names: Any
) -> Any:
    """Translate a rule's function to another dialect.

    Defaults and closures are lost: the function takes all that it needs as arguments or globals.

    Args:
        function: ``update``, ``scalars``, ``statistic`` or ``factor`` of a rule. Functions of this
            package that it names itself, not in a nested function or as ``module.function``, are
            lifted with it.
        arithmetic: the dialect's primitives, by their names in :mod:`torch_bf16.rules.arithmetic`.
        compile: applied to each lifted function.
        names: more globals that the dialect needs.

    Returns:
        What ``compile`` returned for ``function``.
    """
    module = ModuleType("arithmetic")
    vars(module).update(arithmetic)
    scope = {**function.__globals__, **names, "arithmetic": module}
    for name in function.__code__.co_names:
        used = scope.get(name)
        if isinstance(used, FunctionType) and _is_ours(used):
            scope[name] = lift(used, arithmetic, compile, **names)
    return compile(FunctionType(function.__code__, scope, function.__name__))


def _is_ours(function: Any) -> bool:
    return str(function.__module__).startswith(__package__ or "")


def _facts(value: Any, seen: set[int]) -> Iterator[str]:
    """What a function computes, as text: its code, and the numbers and functions it refers to."""
    if isinstance(value, CodeType):
        yield value.co_code.hex()
        for each in value.co_consts:
            yield from _facts(each, seen)
    elif isinstance(value, FunctionType):
        if not _is_ours(value) and id(value) not in seen:
            seen.add(id(value))
            yield from _facts(value.__code__, seen)
            for name in value.__code__.co_names:
                yield name
                yield from _facts(value.__globals__.get(name), seen)
    else:
        # Of other objects, the address would be part of the text.
        plain = isinstance(value, (Number, str, tuple))
        yield repr(value) if plain else type(value).__name__
