"""What DeepSpeed's ZeRO leaves on a rank: of its own ways to train in bf16, and of recipes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torch_bf16.rules import ITERATE

from .memory import held_of
from .optimizers import OptimizerSpec
from .precisions import Precision
from .shapes import ModelShapes, Weight

__all__ = ["ZeroRow", "zero_rows"]


@dataclass(frozen=True)
class ZeroRow:
    """Bytes of all ranks together, gradients and DeepSpeed's buckets for its messages not counted.

    Attributes:
        name: of the precision.
        loses: whether rounding to nearest loses updates.
        weights: in bf16, of every copy of the model.
        states: moments and what is kept beside the weights, of which no rank has a copy.
    """

    name: str
    loses: bool
    weights: int
    states: int

    def on_rank(self, stage: int, ranks: int) -> int:
        """What each of ``ranks`` keeps; the stages before 3 cut no weights."""
        return self.weights // (ranks if stage == 3 else 1) + self.states // ranks

    def record(self, ranks: int) -> dict[str, Any]:
        """As numbers, in bytes."""
        stages = {f"stage_{stage}": self.on_rank(stage, ranks) for stage in (1, 2, 3)}
        return {"precision": self.name, "loses_updates": self.loses, **stages}


def zero_rows(
    shapes: ModelShapes, optimizer: OptimizerSpec, precisions: Iterable[Precision]
) -> Iterator[ZeroRow]:
    """DeepSpeed's own two ways, and the recipes that train in its engine.

    None for schedule-free optimizers, which cannot be evaluated there, nor for those that look at
    whole matrices.

    Args:
        shapes: of the model; DeepSpeed casts all of it.
        optimizer: what it keeps, and what its step takes.
        precisions: those to choose from.
    """
    rule = optimizer.rule
    if rule.stage_states or any(each.role == ITERATE for each in rule.states):
        return
    weights = sum(_weight_bytes(each) for each in shapes.weights)
    trained = [each for each in shapes.weights if each.trained]
    # Layers repeat, and kinds of weights are few.
    one = {each.kind: each for each in trained}
    times = Counter(each.kind for each in trained)
    kinds = [(one[kind], times[kind]) for kind in one]
    numbers, count = sum(each.numel for each in trained), len(rule.states)
    yield ZeroRow("DeepSpeed, fp32 masters", False, weights, numbers * 4 * (1 + count))
    cast = any(each.stays_fp32 for each in shapes.weights)
    for precision in [] if cast else filter(_trains, precisions):
        states = 0
        for each, number in kinds:
            held = held_of(each, each.shape, torch.bfloat16, precision, optimizer)
            states += number * (held.master + held.moments)
        yield ZeroRow(precision.name, False, weights, states)
    # Its master is a copy of the weights.
    yield ZeroRow("DeepSpeed, bf16 states", True, weights, numbers * 2 * (1 + count))


def _trains(precision: Precision) -> bool:
    """Whether a precision is one of ours that DeepSpeed's engine takes."""
    recipe = precision.recipe
    if recipe is None or precision.released or precision.sums is not None:
        return False
    return "int8" not in (recipe.exp_avg, recipe.exp_avg_sq)


def _weight_bytes(weight: Weight) -> int:
    stored = weight.frozen_as or torch.bfloat16
    # DeepSpeed casts whatever floats.
    return weight.numel * (2 if stored.is_floating_point else stored.itemsize)
