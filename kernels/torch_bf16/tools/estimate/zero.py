"""Bytes on a rank under DeepSpeed's ZeRO: with its own ways to train in bf16, and with recipes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torch_bf16.rules import ITERATE

from .memory import held_of
from .optimizers import OptimizerSpec
from .precisions import Precision
from .shapes import ModelShapes, Weight

__all__ = ["zero_rows"]


def zero_rows(
    shapes: ModelShapes, optimizer: OptimizerSpec, precisions: Iterable[Precision], ranks: int
) -> Iterator[dict[str, Any]]:
    """Rows for JSON of DeepSpeed's two native modes, and of the recipes that train in its engine.

    They are bytes on each rank, without gradients and DeepSpeed's buckets for its messages. There
    are none for schedule-free optimizers, which cannot be evaluated there, nor for optimizers that
    work on whole matrices.

    Args:
        shapes: the shapes of the model, all of which DeepSpeed casts.
        optimizer: the states that it keeps, and the scratch of its step.
        precisions: the precisions to choose from.
        ranks: the number of ranks.
    """
    rule = optimizer.rule
    if rule.stage_states or any(each.role == ITERATE for each in rule.states):
        return
    weights = sum(_weight_bytes(each) for each in shapes.weights)
    trained = [each for each in shapes.weights if each.trained]
    # Layers repeat: weights are of a few kinds.
    examples = {each.kind: each for each in trained}
    counts = Counter(each.kind for each in trained)
    numel, moments = sum(each.numel for each in trained), len(rule.states)

    def row(name: str, states: int, loses: bool = False) -> dict[str, Any]:
        # All stages divide moments and what is kept beside weights; only the third divides weights.
        whole, cut = weights + states // ranks, weights // ranks + states // ranks
        stages = {"stage_1": whole, "stage_2": whole, "stage_3": cut}
        return {"precision": name, "loses_updates": loses, **stages}

    yield row("DeepSpeed, fp32 masters", numel * 4 * (1 + moments))
    cast = any(each.stays_fp32 for each in shapes.weights)
    for precision in [] if cast else filter(_trains, precisions):
        states = 0
        for kind, each in examples.items():
            held = held_of(each, each.shape, torch.bfloat16, precision, optimizer)
            states += counts[kind] * (held.master + held.moments)
        yield row(precision.name, states)
    # Its master is a bf16 copy of the weights.
    yield row("DeepSpeed, bf16 states", numel * 2 * (1 + moments), loses=True)


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
