"""The memory that each recipe takes for an observed training, by the functions of ``estimate``."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torch_bf16.recipe import get_recipe
from torch_bf16.tools.estimate.memory import Memory, memory
from torch_bf16.tools.estimate.optimizers import OPTIMIZERS, PLAIN, OptimizerSpec, measure_spec
from torch_bf16.tools.estimate.precisions import TORCH, Precision
from torch_bf16.tools.estimate.shapes import ModelShapes, Weight, shapes_of

from .observation import Observation
from .verdict import CANDIDATES

__all__ = ["sizes"]

# Options that change how torch steps, but not what it keeps.
_HOW = ("lr", "foreach", "fused", "capturable", "differentiable")


def sizes(found: Observation) -> tuple[ModelShapes, dict[str, Memory], str | None]:
    """Bytes on one device, without activations.

    Args:
        found: the observed models and optimizers.

    Returns:
        The shapes; memory by name, of all candidates and of torch's own precisions; and a caveat,
        if there is one.
    """
    shapes = _shapes(found)
    optimizer, note = _spec_of(found.optimizers)
    recipes = {name: get_recipe(mode, **options) for name, (mode, options) in CANDIDATES.items()}
    precisions = [*TORCH, *(Precision(*each) for each in recipes.items())]
    return shapes, {each.name: memory(shapes, each, optimizer) for each in precisions}, note


def _shapes(found: Observation) -> ModelShapes:
    if found.models.roots:
        roots = found.models.roots
        model = roots[0] if len(roots) == 1 else nn.ModuleList(roots)
        shapes = shapes_of(model, "the model")
        staying = {n for n, p in model.named_parameters() if found.models.stays_fp32(p)}
        weights = [replace(each, stays_fp32=each.name in staying) for each in shapes.weights]
        return replace(shapes, weights=weights)
    weights = [Weight(each.name, each.shape) for each in found.parameters.values()]
    return ModelShapes("the parameters that were trained", weights)


def _spec_of(optimizers: list[torch.optim.Optimizer]) -> tuple[OptimizerSpec, str | None]:
    kinds = sorted({type(each).__name__ for each in optimizers})
    name = kinds[0]
    if len(kinds) == 1 and name in OPTIMIZERS:
        known: Any = inspect.signature(OPTIMIZERS[name]).parameters
        options = {k: v for k, v in optimizers[0].defaults.items() if k in known and v is not None}
        options = {k: v for k, v in options.items() if k not in _HOW}
        try:
            return measure_spec(name, name, options), None
        # An option that our class lacks; convert() reports it, too.
        except ValueError:
            pass
    note = f"moments are counted as AdamW's: those of {', '.join(kinds)} are not known in advance"
    return OptimizerSpec("AdamW", *PLAIN["AdamW"]), note
