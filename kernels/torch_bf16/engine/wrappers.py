"""Our optimizers inside of others: a host's wrapper, SAM, Lookahead."""

from __future__ import annotations

from typing import Any

import torch

from .engine import engine_of

__all__ = ["held_optimizers", "optimizer_for", "unwrap"]


def held_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers of ours that one is, or holds at any depth, each once; the innermost count."""
    seen: set[int] = set()

    def look(each: Any) -> list[Any]:
        if id(each) in seen:
            return []
        seen.add(id(each))
        members = (v for v in vars(each).values() if isinstance(v, torch.optim.Optimizer))
        inside = [*members, getattr(each, "optimizer", None)]
        found = [one for other in inside if hasattr(other, "__dict__") for one in look(other)]
        return found or ([] if engine_of(each) is None else [each])

    return look(optimizer) if hasattr(optimizer, "__dict__") else []


def unwrap(optimizer: Any) -> Any | None:
    """The one optimizer of ours that one is or holds; None where there is none.

    Raises:
        ValueError: it holds several, or one that has not all of its parameters.
    """
    found = held_optimizers(optimizer)
    if not found:
        return None
    kind = type(optimizer).__name__
    if len(found) > 1:
        held = ", ".join(type(each).__name__ for each in found)
        raise ValueError(
            f"this {kind} holds {len(found)} optimizers of torch_bf16 ({held}), and it is not "
            "clear which is meant; give them themselves"
        )
    (ours,) = found
    own = {id(each) for group in ours.param_groups for each in group["params"]}
    groups = getattr(optimizer, "param_groups", ())
    left = sum(id(each) not in own for group in groups for each in group["params"])
    if left:
        raise ValueError(
            f"this {kind} has {left} parameters that the {type(ours).__name__} in it does not "
            "have, as ranks of ZeroRedundancyOptimizer step for some each; give an optimizer "
            "that has all of them"
        )
    return ours


def optimizer_for(function: str, optimizer: Any) -> Any:
    """The optimizer of ours that a function was given, also within a wrapper.

    Raises:
        ValueError: there is none, or :func:`unwrap` raises it.
    """
    ours = unwrap(optimizer)
    if ours is None:
        raise ValueError(
            f"{function} was given a {type(optimizer).__name__}, which stores its numbers by no "
            "recipe; give it an optimizer of torch_bf16, or one that convert(), prepare() or a "
            "host's precision mode has converted"
        )
    return ours
