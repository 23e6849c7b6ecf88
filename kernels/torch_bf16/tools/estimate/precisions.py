"""The precisions that are compared: torch's, and every recipe, with gradients kept or released."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from torch_bf16.gradients.gathering import LIMIT
from torch_bf16.recipe import RECIPES, Recipe, get_recipe
from torch_bf16.tools.recipes import BY_BYTES

__all__ = ["TORCH", "Precision", "precisions"]


@dataclass(frozen=True)
class Precision:
    """A way to keep the numbers of a run.

    Attributes:
        name: for people: a recipe's name, or its formats of weights and moments.
        recipe: None for torch's own optimizers.
        dtype: the dtype that parameters are cast to.
        autocast: whether the model computes in bf16 with fp32 weights.
        released: whether each gradient is freed by its own step.
        loses: whether rounding to nearest loses updates.
    """

    name: str
    recipe: Recipe | None = None
    dtype: torch.dtype = torch.bfloat16
    autocast: bool = False
    released: bool = False
    loses: bool = False

    @property
    def sums(self) -> str | None:
        """The format of sums of gradients beside ``p.grad``; None if gradients add up there."""
        recipe = self.recipe
        return None if recipe is None or recipe.accumulate == "bf16_nearest" else recipe.accumulate

    @property
    def waiting(self) -> int | None:
        """Bytes of gradients that wait to be taken within the backward pass, by a step or a sum.

        None if nothing takes them before the optimizer's step.
        """
        if self.sums == "fp32":
            return 0  # each is added at once
        return LIMIT if self.released or self.sums is not None else None


TORCH = (
    Precision("32-true", dtype=torch.float32),
    Precision("bf16-mixed", dtype=torch.float32, autocast=True),
    Precision("bf16-true", loses=True),
)
"""The precisions of torch's own optimizers."""


def precisions(
    accumulate: str | None = None,
    reduce: str = "wrapper",
    offload: str = "none",
    roles: Collection[str] = ("exp_avg", "exp_avg_sq"),
) -> Iterator[Precision]:
    """All precisions, the largest first.

    Args:
        accumulate: the recipes' format for sums of gradients over several passes, during which
            releasing gradients saves nothing and is left out; None for one pass.
        reduce: how the recipes' gradients are summed over ranks.
        offload: what the recipes keep in host memory.
        roles: the roles of the moments that the optimizer keeps; of recipes with the same formats
            for these, only the first is listed.
    """
    *wide, nearest = TORCH
    yield from wide
    recipes: dict[str, Recipe] = {}
    ways = {"accumulate": accumulate or "bf16_nearest", "reduce": reduce, "offload": offload}
    named = {_formats(each): name for name, each in RECIPES.items()}
    for each in BY_BYTES.values():
        recipes[named.get(_formats(each), " / ".join(_formats(each)))] = get_recipe(each, **ways)
    stored = set()
    for name, recipe in sorted(recipes.items(), key=lambda each: -each[1].bytes_per_parameter):
        formats = (recipe.weights, *(getattr(recipe, role) for role in sorted(roles)))
        if formats in stored:
            continue
        stored.add(formats)
        yield Precision(name, recipe)
        if accumulate is None:
            yield Precision(name, recipe, released=True)
    yield nearest


def _formats(recipe: Recipe) -> tuple[str, str, str]:
    return recipe.weights, recipe.exp_avg, recipe.exp_avg_sq
