"""Parameter groups of either vectors or matrices, for hosts that flatten a group into one tensor.

A flat tensor has one format, but vectors and matrices have different ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torch_bf16.engine.engine import engine_of
from torch_bf16.errors import with_article
from torch_bf16.sharding import shard_of

__all__ = ["separate_vectors"]

# Attributes of torch's schedulers with one value for each group.
_PER_GROUP = (
    *("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs"),
    *("base_momentums", "max_momentums"),
)


def separate_vectors(optimizer: torch.optim.Optimizer, schedulers: Iterable[Any] = ()) -> bool:
    """Put parameters with at most one dimension into parameter groups of their own.

    Call it before ``deepspeed.initialize``, which makes one tensor of each group. Groups that hold
    only vectors, or none, stay; from the other groups the vectors move to new groups with the same
    options, behind all existing ones. The places of parameters change, which key the rounding noise
    of parameters without names. A recipe with ``vectors="like_matrices"`` needs none of this.

    Args:
        optimizer: any optimizer; its groups are mutated.
        schedulers: the optimizer's existing learning-rate schedulers, torch's or compositions of
            those, which are extended by the new groups. Mutated.

    Returns:
        Whether there was something to separate.

    Example:
        >>> optimizer = torch_bf16.AdamW(torch.nn.Linear(4, 4).parameters(), lr=1e-3)
        >>> torch_bf16.separate_vectors(optimizer)
        True
        >>> [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
        [[(4, 4)], [(4,)]]
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"separate_vectors takes an optimizer, not {with_article(optimizer)}. Nothing was "
            "changed"
        )
    groups, engine = optimizer.param_groups, engine_of(optimizer)
    if engine is not None and optimizer.recipe.vectors == "like_matrices":  # pyright: ignore[reportAttributeAccessIssue]
        return False
    before, origins = len(groups), []
    for number, group in enumerate([*groups]):
        flags = [len(shard_of(each).shape) < 2 for each in group["params"]]
        if all(flags) or not any(flags):
            continue
        rest: dict[str, Any] = {**group}
        for key in ("params", "param_names"):
            if key in group:
                pairs = [*zip(group[key], flags, strict=True)]
                rest[key] = [each for each, vector in pairs if vector]
                group[key] = [each for each, vector in pairs if not vector]
        groups.append(rest)
        origins.append(number)
    if not origins:
        return False
    for scheduler in schedulers:
        _extend(scheduler, before, origins)
    if engine is not None:
        engine.invalidate()
    return True


def _extend(scheduler: Any, before: int, origins: list[int]) -> None:
    for name in _PER_GROUP:
        values = vars(scheduler).get(name)
        if isinstance(values, list) and len(values) == before:
            values += [values[number] for number in origins]
    for each in getattr(scheduler, "_schedulers", ()):
        _extend(each, before, origins)
