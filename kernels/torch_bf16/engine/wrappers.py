"""Finds our optimizers inside others: a host's wrapper, SAM, Lookahead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_bf16.errors import warn, with_article
from torch_bf16.parameters import parameters_of

from .engine import engine_of, has_living_master

__all__ = [
    "held_optimizers",
    "optimizer_for",
    "optimizers_for",
    "optimizers_in",
    "owners",
    "warn_of_left_out",
]


def optimizers_in(holder: Any) -> dict[str, torch.optim.Optimizer]:
    """The optimizers, of any library, that are attributes of an object, by the attribute's name.

    Also those in lists, tuples and dicts that are attributes.
    """
    named = dict(vars(holder)) if hasattr(holder, "__dict__") else {}
    for name, each in [*named.items()]:
        if type(each) in (list, tuple):
            named |= {f"{name}[{place}]": item for place, item in enumerate(each)}
        elif type(each) is dict:
            named |= {f"{name}[{key!r}]": item for key, item in each.items()}
    return {k: v for k, v in named.items() if issubclass(type(v), torch.optim.Optimizer)}


def held_optimizers(optimizer: Any) -> list[Any]:
    """Find the optimizers of this package in an optimizer, at any depth: each innermost one once.

    One of this package, or a converted one, that holds no other is found itself.

    Args:
        optimizer: an optimizer, perhaps around others, as SAM and Lookahead are, or a host's
            wrapper; anything else holds none.

    Returns:
        The optimizers that take the steps by a recipe; empty if none was made here or converted. In
        a ``ZeroRedundancyOptimizer``, each has only the parameters that its rank updates.

    Example:
        >>> plugin_api.held_optimizers(optimizer) == [optimizer]
        True
    """
    seen: set[int] = set()

    def search(holder: Any) -> list[Any]:
        if id(holder) in seen:
            return []
        seen.add(id(holder))
        inside = [*optimizers_in(holder).values(), getattr(holder, "optimizer", None)]
        found = [ours for each in inside if hasattr(each, "__dict__") for ours in search(each)]
        return found or ([] if engine_of(holder) is None else [holder])

    return search(optimizer) if hasattr(optimizer, "__dict__") else []


def owners(optimizers: Iterable[Any]) -> dict[Tensor, Any]:
    """The optimizer of each parameter; of several that have it, the last one."""
    return {p: each for each in optimizers for p in parameters_of(each)}


def optimizer_for(function: str, optimizer: Any) -> Any:
    """The optimizer of ours that was passed to a function, perhaps in a wrapper.

    Raises:
        ValueError: there is none, or more than one, or it lacks parameters of its wrapper.
    """
    found = held_optimizers(optimizer)
    if not found:
        raise ValueError(
            f"{function} was given {with_article(optimizer)}, which does not store its numbers "
            "by a recipe; pass an optimizer of torch_bf16, or one that convert(), prepare() or a "
            "host's precision mode has converted"
        )
    kind = type(optimizer).__name__
    if len(found) > 1:
        held = ", ".join(type(each).__name__ for each in found)
        raise ValueError(
            f"this {kind} holds {len(found)} optimizers of torch_bf16 ({held}), and it is not "
            "clear which is meant; pass one of these instead"
        )
    (ours,) = found
    own = {*map(id, parameters_of(ours))}
    groups = getattr(optimizer, "param_groups", ())
    left = sum(id(each) not in own for group in groups for each in group["params"])
    if left:
        raise ValueError(
            f"this {kind} has {left} parameters that the {type(ours).__name__} in it does not "
            "have, as in ZeroRedundancyOptimizer, where each rank steps for some of them; pass an "
            "optimizer that has all of them"
        )
    return ours


def optimizers_for(function: str, optimizers: Iterable[Any]) -> list[Any]:
    """Our optimizers that were passed to a function, each as an argument of its own.

    Raises:
        ValueError: one is a list, or as for :func:`optimizer_for`.
    """
    optimizers = [*optimizers]
    for each in optimizers:
        if isinstance(each, (list, tuple)):
            raise ValueError(
                f"{function} was given a {type(each).__name__} of {len(each)}; pass each optimizer "
                "as an argument of its own, such as *optimizers"
            )
    return [optimizer_for(function, each) for each in optimizers]


def warn_of_left_out(function: str, model: nn.Module, passed: Sequence[Any]) -> None:
    """Warn of weights whose exact masters are in an optimizer that was not passed to a function.

    If none was passed, bf16 numbers were asked for.

    Args:
        function: its name.
        model: the module whose exact weights it reads; not gathered by FSDP2 now.
        passed: the result of :func:`optimizers_for`.
    """
    if not passed:
        return
    known = owners(passed)
    left = {name: p for name, p in model.named_parameters() if p not in known}
    if names := [name for name, each in left.items() if has_living_master(each)]:
        warn(
            f"{function} was given {', '.join(type(each).__name__ for each in passed)}, and "
            f"{len(names)} weights of the {type(model).__name__}, the first {names[0]!r}, have "
            "exact masters in an optimizer that was not passed: what is read of them is bf16. Pass "
            f"every optimizer that trains the {type(model).__name__}"
        )
