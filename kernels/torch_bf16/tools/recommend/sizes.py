"""What each recipe holds of a training that was seen, by the functions of ``estimate``."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from torch_bf16.tools.estimate.memory import Memory, memory
from torch_bf16.tools.estimate.optimizers import OPTIMIZERS, PLAIN, OptimizerSpec, measure_spec
from torch_bf16.tools.estimate.precisions import TORCH, Precision
from torch_bf16.tools.estimate.shapes import ModelShapes, Weight, shapes_of

from .observation import Observation
from .verdict import Candidate

__all__ = ["sizes"]

# How torch steps, and not what it keeps.
_HOW = ("lr", "foreach", "fused", "capturable", "differentiable")


def sizes(
    found: Observation, candidates: list[Candidate]
) -> tuple[ModelShapes, dict[str, Memory], str | None]:
    """Bytes on one device, activations not counted.

    Args:
        found: whose models and optimizers are counted.
        candidates: recipes.

    Returns:
        The shapes, memory by name, torch's own precisions too, and what is to be known about it.
    """
    shapes = _shapes(found)
    optimizer, note = _spec_of(found.optimizers)
    precisions = [*TORCH, *(Precision(each.name, each.recipe) for each in candidates)]
    return shapes, {each.name: memory(shapes, each, optimizer) for each in precisions}, note


def _shapes(found: Observation) -> ModelShapes:
    if found.models.roots:
        roots = found.models.roots
        return shapes_of(roots[0] if len(roots) == 1 else nn.ModuleList(roots), "the model")
    weights = [Weight(each.name, each.shape) for each in found.parameters.values()]
    return ModelShapes("the parameters that were trained", weights)


def _spec_of(optimizers: list[torch.optim.Optimizer]) -> tuple[OptimizerSpec, str | None]:
    kinds = sorted({type(each).__name__ for each in optimizers})
    name = kinds[0]
    if len(kinds) == 1 and name in OPTIMIZERS:
        known: Any = inspect.signature(OPTIMIZERS[name]).parameters
        given = {k: v for k, v in optimizers[0].defaults.items() if k in known and v is not None}
        given = {k: v for k, v in given.items() if k not in _HOW}
        try:
            return measure_spec(name, name, given), None
        # An option that ours has not: convert() says so, too.
        except ValueError:
            pass
    note = f"moments are counted as AdamW's: those of {', '.join(kinds)} are not known before"
    return OptimizerSpec("AdamW", *PLAIN["AdamW"]), note
