"""Bytes on a rank under DeepSpeed's ZeRO: with its own ways to train in bf16, and with recipes."""

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
    """Bytes of one precision, without gradients and DeepSpeed's buckets for its messages.

    Attributes:
        name: the precision's name.
        loses: whether rounding to nearest loses updates.
        weights: bytes of one copy of the model, in bf16.
        states: bytes of moments and of what is kept beside the weights, on all ranks together.
    """

    name: str
    loses: bool
    weights: int
    states: int

    def on_rank(self, stage: int, ranks: int) -> int:
        """Bytes on each of ``ranks``; the stages before 3 do not split weights."""
        return self.weights // (ranks if stage == 3 else 1) + self.states // ranks

    def record(self, ranks: int) -> dict[str, Any]:
        """The row for JSON, in bytes on each rank."""
        stages = {f"stage_{stage}": self.on_rank(stage, ranks) for stage in (1, 2, 3)}
        return {"precision": self.name, "loses_updates": self.loses, **stages}


def zero_rows(
    shapes: ModelShapes, optimizer: OptimizerSpec, precisions: Iterable[Precision]
) -> Iterator[ZeroRow]:
    """Rows for DeepSpeed's two native modes, and for the recipes that train in its engine.

    There are none for schedule-free optimizers, which cannot be evaluated there, nor for optimizers
    that work on whole matrices.

    Args:
        shapes: the shapes of the model, all of which DeepSpeed casts.
        optimizer: the states that it keeps, and the scratch of its step.
        precisions: the precisions to choose from.
    """
    rule = optimizer.rule
    if rule.stage_states or any(each.role == ITERATE for each in rule.states):
        return
    weights = sum(_weight_bytes(each) for each in shapes.weights)
    trained = [each for each in shapes.weights if each.trained]
    # Layers repeat: weights are of a few kinds.
    examples = {each.kind: each for each in trained}
    counts = Counter(each.kind for each in trained)
    kinds = [(examples[kind], counts[kind]) for kind in examples]
    numel, moments = sum(each.numel for each in trained), len(rule.states)
    yield ZeroRow("DeepSpeed, fp32 masters", False, weights, numel * 4 * (1 + moments))
    cast = any(each.stays_fp32 for each in shapes.weights)
    for precision in [] if cast else filter(_trains, precisions):
        states = 0
        for each, number in kinds:
            held = held_of(each, each.shape, torch.bfloat16, precision, optimizer)
            states += number * (held.master + held.moments)
        yield ZeroRow(precision.name, False, weights, states)
    # Its master is a bf16 copy of the weights.
    yield ZeroRow("DeepSpeed, bf16 states", True, weights, numel * 2 * (1 + moments))


def _trains(precision: Precision) -> bool:
    """Whether a precision is one of ours that DeepSpeed's engine takes."""
    recipe = precision.recipe
    if recipe is None or precision.released or precision.sums is not None:
        return False
    return "int8" not in (recipe.exp_avg, recipe.exp_avg_sq)


def _weight_bytes(weight: Weight) -> int:
    stored = weight.frozen_as or torch.bfloat16
    # DeepSpeed casts every floating-point tensor.
    return weight.numel * (2 if stored.is_floating_point else stored.itemsize)
