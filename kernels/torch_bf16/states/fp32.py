"""Optimizer states as fp32 numbers, for those who know nothing of formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bf16.recipe import Recipe

from .recoding import stored_format
from .views import AS_NUMBERS, MASTERS

__all__ = ["fp32_numbers", "gatherable"]


def fp32_numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """New fp32 tensors with the numbers that a state holds, exactly; masters are left out."""
    plain, planes = {}, set(MASTERS)
    for key in state:
        if key in planes:
            continue
        format_ = stored_format(state, key, None)
        if format_ is not None:
            keys = format_.plane_names(key)
            # A copy: torch's load_state_dict would go on with this optimizer's own tensor.
            plain[key] = format_.decode([state[each] for each in keys]).clone()
            planes.update(keys[1:])
        else:
            plain[key] = state[key]
    return {key: value for key, value in plain.items() if key not in planes}


def gatherable(
    state: Mapping[str, Any],
    parameter: Tensor,
    shapes: Sequence[Sequence[int]],
    recipe: Recipe,
) -> dict[str, Any]:
    """The state of a parameter that FSDP1 has flattened, as FSDP1 can gather it.

    FSDP1 gathers the states of a unit's parameters as if they were one tensor: all of one dtype,
    and each name with every parameter. So all numbers are fp32, and what one format has beyond the
    parameter stands beside all, NaN where there is none. No bit is lost.

    Args:
        state: of the parameter.
        parameter: what FSDP1 has left of it on this rank.
        shapes: of all parameters of the unit.
        recipe: decides formats.
    """
    found = fp32_numbers(state)
    if parameter.dtype != torch.bfloat16:
        return found
    formats = [recipe.format_of("weights", shape) for shape in shapes]
    for key in sorted({name for each in formats for name in each.plane_names("")[1:]}):
        shown = AS_NUMBERS.get(key, key)
        if key in state:
            found[shown] = state[key].to(torch.float32, copy=True)
        else:
            found[shown] = torch.full_like(parameter, torch.nan, dtype=torch.float32)
    return found
