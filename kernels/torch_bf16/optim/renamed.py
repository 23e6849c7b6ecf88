"""Tells of parameters whose names have changed since they were saved, and with them their noise."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

from torch import Tensor

from torch_bf16.parameters import parameters_of
from torch_bf16.recipe import Recipe
from torch_bf16.rules import FIRST_MOMENT, SECOND_MOMENT
from torch_bf16.sharding import bare_name, shard_of

if TYPE_CHECKING:
    from .optimizer import BF16Optimizer

__all__ = ["tell_of_other_noise"]

_logger = logging.getLogger("torch_bf16")


def tell_of_other_noise(
    optimizer: BF16Optimizer,
    saved_names: Iterable[Iterable[str | None]],
    states: Iterable[Tensor],
) -> None:
    """Log it if parameters have other names than when they were saved.

    Pruning and parametrizations rename them, and a run that goes on with its optimizer keeps the
    keys that its noise had.

    Args:
        optimizer: the optimizer, with the recipe by which it goes on.
        saved_names: the names of each group in the state dict, None where unknown.
        states: the parameters whose states were loaded.
    """
    theirs = [name and bare_name(name) for of_group in saved_names for name in of_group]
    parameters = parameters_of(optimizer)
    ours = [*chain.from_iterable(optimizer._engine.names.known(optimizer.param_groups))]
    if len(theirs) != len(ours):
        return
    loaded = {*map(id, states)}
    other = [
        (one, another)
        for parameter, one, another in zip(parameters, theirs, ours, strict=True)
        if one != another and id(parameter) in loaded and _draws(optimizer.recipe, parameter)
    ]
    if other:
        _logger.warning(
            "%d of %d parameters had other names when the state dict was saved (%s, now %s): names "
            "key the noise, so that the bits will differ from those of the run that saved it. To "
            "repeat it, convert or make the optimizer while the parameters have the names of then",
            *(len(other), len(ours), *(name or "no name" for name in other[0])),
        )


def _draws(recipe: Recipe, parameter: Tensor) -> bool:
    """Whether any number that is stored for a parameter may be rounded stochastically."""
    shape, roles = shard_of(parameter).shape, ("weights", FIRST_MOMENT, SECOND_MOMENT)
    return any(recipe.format_of(role, shape, parameter.dtype).stochastic for role in roles)
