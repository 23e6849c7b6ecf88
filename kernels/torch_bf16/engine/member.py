"""A parameter of a plan, with everything that its step needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_bf16.formats import Format
from torch_bf16.memory import TransposedOrder
from torch_bf16.recipe import Recipe
from torch_bf16.rules import Rule
from torch_bf16.sharding import Shard

from .direction import Direction
from .versions import Snapshot

__all__ = ["Member", "formats_of"]


@dataclass(slots=True)
class Member:
    """A parameter of a plan.

    Attributes:
        shard: what this rank holds of the parameter; bf16, fp32 or complex64.
        group: number of the parameter group.
        rule: the update rule.
        formats: the formats of the weight and of each of the rule's states.
        state: ``optimizer.state[parameter]``, complete; the plan puts its own ``step`` there.
        keys: the keys of ``state`` that the rule uses; any other entry is the user's.
        gradient_dtype: bfloat16 or float32, or complex64 for a complex parameter.
        snapshot: version, dtype and shape that the last step left.
        direction: computes what the rule takes in place of the gradient; None if the rule takes
            the gradient itself.
        steps: number of steps taken, for the direction.
        order: the order in which the parameter and its states lie; None if states are in row-major
            order, as the parameter mostly is.
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
    order: TransposedOrder | None = None

    @property
    def in_place(self) -> bool:
        """Whether kernels update the parameter where it lies, and not in a copy."""
        return self.order is not None or self.shard.memory.is_contiguous()

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
        """Whether the state holds a part of the weight; writing the weight makes that part void."""
        return len(self.weights.planes) > 1


def formats_of(shard: Shard, rule: Rule, recipe: Recipe) -> tuple[Format, ...]:
    """The formats of a parameter's weight and of each of the rule's states.

    Raises:
        NotImplementedError: the parameter is cut within the blocks of a format, or consists of
            tensors in several formats.
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
