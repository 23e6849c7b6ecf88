"""Read the weight that training would resume from: with its master, if the checkpoint has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from torch_bf16.checkpoints.reader import SavedTensor
from torch_bf16.states.recoding import stored_format
from torch_bf16.states.views import MASTERS, masters_in

__all__ = ["CHUNK", "Read", "has_master", "moment", "weight"]

CHUNK = 1 << 21
"""Elements that are read at a time: whole blocks of every format."""

Read = Callable[[int, int], Tensor]
"""``read(start, stop)``: those elements of the flattened tensor, in fp32."""


def weight(tensor: SavedTensor, state: Mapping[str, Any]) -> Read:
    """A reader of a weight in fp32, decoded with the master in ``state``, if any."""
    saved = {k: each for k, each in state.items() if k in MASTERS and isinstance(each, SavedTensor)}
    fits = all(each.shape == tensor.shape for each in saved.values())
    if tensor.dtype != torch.bfloat16 or not saved or not fits:
        return lambda start, stop: tensor.read(start, stop).float()

    def exact(start: int, stop: int) -> Tensor:
        visible = tensor.read(start, stop)
        masters = masters_in({key: each.read(start, stop) for key, each in saved.items()})
        format_ = stored_format(masters, "")
        if format_ is None or len(format_.planes) != len(masters) + 1:
            return visible.float()
        keys = format_.plane_names("")[1:]
        return format_.decode([visible, *(masters[key] for key in keys)])

    return exact


def has_master(tensor: SavedTensor, state: Mapping[str, Any]) -> bool:
    """Whether a weight has more bits than its parameter."""
    return tensor.dtype == torch.bfloat16 and any(key in state for key in MASTERS)


def moment(state: Mapping[str, Any], name: str, shape: Sequence[int]) -> Read | None:
    """A reader of a moment in fp32; None if there is none that can be read for each element.

    Args:
        state: what the optimizer keeps for a weight.
        name: the moment's.
        shape: the weight's.
    """
    format_ = stored_format(state, name)
    if format_ is None:
        return None
    planes = list(zip(format_.plane_names(name), format_.planes, strict=True))
    # Codes are saved with one more dimension.
    if getattr(state[name], "shape", None) not in (tuple(shape), (*shape, 1)):
        return None
    for key, plane in planes:
        each = state[key]
        if not isinstance(each, SavedTensor) or each.numel != -(-prod(shape) // plane.block):
            return None

    def read(start: int, stop: int) -> Tensor:
        pieces = [
            state[key].read(start // plane.block, -(-stop // plane.block)) for key, plane in planes
        ]
        return format_.decode(pieces)

    return read
