"""The memory that each recipe takes for an observed training, by the functions of ``estimate``."""

from __future__ import annotations

import inspect
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from torch_bf16.recipe import get_recipe
from torch_bf16.tools.estimate.memory import Memory, memory
from torch_bf16.tools.estimate.optimizers import (
    OPTIMIZERS,
    OptimizerSpec,
    measure_spec,
    optimizer_spec,
)
from torch_bf16.tools.estimate.precisions import TORCH, Precision
from torch_bf16.tools.estimate.shapes import ModelShapes, Weight, shapes_of

from .observation import Observation
from .verdict import CANDIDATES

__all__ = ["sizes"]

# Options that change how torch steps, but not what it keeps.
_WAYS_TO_STEP = ("lr", "foreach", "fused", "capturable", "differentiable")


def sizes(found: Observation) -> tuple[ModelShapes, dict[str, Memory], str | None]:
    """Bytes on one device, without activations.

    Args:
        found: the observed models and optimizers.

    Returns:
        The shapes; memory by name, of all candidates and of torch's own precisions; and a caveat,
        if there is one.
    """
    shapes, ids = _shapes(found)
    parts, note = _parts(found, shapes, ids)
    recipes = {name: get_recipe(mode, **options) for name, (mode, options) in CANDIDATES.items()}
    precisions = [*TORCH, *(Precision(*each) for each in recipes.items())]
    return shapes, {each.name: _memory(parts, each) for each in precisions}, note


def _shapes(found: Observation) -> tuple[ModelShapes, dict[str, int]]:
    """The shapes of the models, and the ``id`` of each parameter by its name there."""
    if not found.models.roots:
        weights = [Weight(each.name, each.shape) for each in found.parameters.values()]
        shapes = ModelShapes("the parameters that were trained", weights)
        return shapes, {each.name: number for number, each in found.parameters.items()}
    roots = found.models.roots
    model = roots[0] if len(roots) == 1 else nn.ModuleList(roots)
    shapes, named = shapes_of(model, "the model"), dict(model.named_parameters())
    weights = [
        replace(each, stays_fp32=found.models.stays_fp32(named[each.name]))
        for each in shapes.weights
    ]
    return replace(shapes, weights=weights), {name: id(p) for name, p in named.items()}


def _parts(
    found: Observation, shapes: ModelShapes, ids: dict[str, int]
) -> tuple[list[tuple[ModelShapes, OptimizerSpec]], str | None]:
    """The shapes whose weights are updated by the same rule, and a caveat."""
    # What no optimizer has is counted without moments.
    specs: dict[str, OptimizerSpec] = {"": optimizer_spec("SGD")}
    updated_by: dict[int, str] = {}
    unknown = set()
    for optimizer in found.optimizers:
        kind = type(optimizer).__name__
        for group in optimizer.param_groups:
            options = _options(kind, {name: group.get(name) for name in optimizer.defaults})
            key = f"{kind}({options})"
            if key not in specs:
                spec = _spec_of(kind, options)
                unknown |= set() if spec else {kind}
                specs[key] = spec or optimizer_spec("AdamW")
            updated_by |= {id(p): key for p in group["params"]}
    weights: dict[str, list[Weight]] = defaultdict(list)
    for each in shapes.weights:
        weights[updated_by.get(ids[each.name], "")].append(each)
    # One part has the buffers, too.
    first, *rest = weights
    parts = [(replace(shapes, weights=weights[first]), specs[first])]
    parts += [(ModelShapes(shapes.source, weights[key]), specs[key]) for key in rest]
    kinds = ", ".join(sorted(unknown))
    note = f"moments are counted as AdamW's: those of {kinds} are not known in advance"
    return parts, note if unknown else None


def _memory(parts: list[tuple[ModelShapes, OptimizerSpec]], precision: Precision) -> Memory:
    """The memory of all parts, which are stepped one after the other."""
    each = [asdict(memory(shapes, precision, optimizer)) for shapes, optimizer in parts]
    total = {name: sum(part[name] for part in each) for name in each[0]}
    if precision.recipe is None:
        # torch's scratch is that of one step; what a cast set aside lives until its own step.
        total["passing"] = max(part["passing"] for part in each)
    return Memory(**total)


def _options(kind: str, group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group that our class of that name knows, and that decide what is kept."""
    known = inspect.signature(OPTIMIZERS[kind]).parameters if kind in OPTIMIZERS else ()
    return {
        k: v for k, v in group.items() if k in known and k not in _WAYS_TO_STEP and v is not None
    }


def _spec_of(kind: str, options: dict[str, Any]) -> OptimizerSpec | None:
    """The states of an optimizer; None if they are not known in advance."""
    # An option that our class lacks is reported by convert(), too.
    with suppress(ValueError):
        return measure_spec(kind, kind, options) if kind in OPTIMIZERS else None
