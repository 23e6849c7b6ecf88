"""Parameter groups of which each holds vectors or matrices, for hosts that lay a group end to end.

What a host has flattened has one format; vectors and matrices have different ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torch_bf16.engine.engine import engine_of
from torch_bf16.sharding import shard_of

__all__ = ["separate_vectors"]

# What torch's schedulers keep for each group, outside of it.
_PER_GROUP = (
    *("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs"),
    *("base_momentums", "max_momentums"),
)


def separate_vectors(optimizer: torch.optim.Optimizer, schedulers: Iterable[Any] = ()) -> bool:
    """Put parameters with at most one dimension into parameter groups of their own.

    Call it before ``deepspeed.initialize``, which makes one tensor of each group. Groups that hold
    only vectors, or none, stay; of the others the vectors go into a new group with the same
    options, behind all others. Without names, places key the rounding noise, and these change.

    Args:
        optimizer: any, its groups are mutated.
        schedulers: learning-rate schedulers of it that exist already, which then know the new
            groups; torch's and those made of them. Mutated.

    Returns:
        Whether there was something to separate.

    Example:
        >>> optimizer = torch_bf16.AdamW(torch.nn.Linear(4, 4).parameters(), lr=1e-3)
        >>> torch_bf16.separate_vectors(optimizer)
        True
        >>> [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
        [[(4, 4)], [(4,)]]
    """
    groups, engine = optimizer.param_groups, engine_of(optimizer)
    given = {} if engine is None else engine.names.given
    named = {
        parameter: given[number, place]
        for number, group in enumerate(groups)
        for place, parameter in enumerate(group["params"])
        if (number, place) in given
    }
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
        engine.names.given = {
            (number, place): named[parameter]
            for number, group in enumerate(groups)
            for place, parameter in enumerate(group["params"])
            if parameter in named
        }
        engine.invalidate()
    return True


def _extend(scheduler: Any, before: int, origins: list[int]) -> None:
    for name in _PER_GROUP:
        values = vars(scheduler).get(name)
        if isinstance(values, list) and len(values) == before:
            values += [values[number] for number in origins]
    for each in getattr(scheduler, "_schedulers", ()):
        _extend(each, before, origins)
