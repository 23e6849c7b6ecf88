"""A parameter that takes part in a step, and what the optimizer remembers of it between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_bf16.formats import Format
from torch_bf16.recipe import Recipe
from torch_bf16.rules import Rule
from torch_bf16.sharding import Shard

from .direction import Direction
from .versions import Snapshot

__all__ = ["Member", "formats_of"]


@dataclass(slots=True)
class Member:
    """A parameter that takes part in a step.

    Attributes:
        shard: what this rank holds of it; bf16 or fp32.
        group: number of its parameter group.
        rule: its rule.
        formats: of the weight and of each of the rule's states.
        state: ``optimizer.state[parameter]``, complete; the plan puts its own ``step`` there.
        keys: of what the rule uses of it; what else is there is the user's.
        gradient_dtype: bfloat16 or float32.
        snapshot: what the optimizer remembers of it.
        direction: computes what the rule takes in place of the gradient; None if that is the
            gradient itself.
        steps: how many steps it has taken, for the direction.
    """

    shard: Shard
    group: int
    rule: Rule
    formats: tuple[Format, ...]
    state: dict[str, Any]
    keys: tuple[str, ...]
    gradient_dtype: torch.dtype
    snapshot: Snapshot
    direction: Direction | None = None
    steps: int = 0

    @property
    def parameter(self) -> Tensor:
        """The parameter itself."""
        return self.shard.parameter

    @property
    def weights(self) -> Format:
        """The format of the weight."""
        return self.formats[0]

    @property
    def has_master(self) -> bool:
        """Whether the state has a part of the weight, which another weight makes void."""
        return len(self.weights.planes) > 1


def formats_of(shard: Shard, rule: Rule, recipe: Recipe) -> tuple[Format, ...]:
    """The formats of a parameter's weight and of each of the rule's states.

    Raises:
        NotImplementedError: the parameter is cut within the blocks of one of them, or is made of
            tensors of several formats.
    """
    dtype = shard.parameter.dtype
    roles = ("weights", *(state.role for state in rule.states))
    found = {
        tuple(recipe.format_of(role, shape, dtype) for role in roles) for shape in shard.shapes
    }
    for each in {each for formats in found for each in formats}:
        shard.check_blocks(each.block)
    formats, *others = found
    if others:
        raise NotImplementedError(shard.mixed)
    return formats
