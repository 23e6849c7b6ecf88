"""Read the weight that training would resume from: with its master, if the checkpoint has one.

A master is whatever an optimizer, of ours or another library's, keeps of a weight beyond its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from torch_bf16.checkpoints.reader import SavedTensor
from torch_bf16.states.recoding import stored_format
from torch_bf16.states.views import MASTERS, masters_in
from torch_bf16.tools.foreign_states import MASTER, SUM, UNREADABLE, extra_bits

__all__ = ["CHUNK", "Read", "has_master", "hides_bits", "moment", "weight"]

CHUNK = 1 << 21
"""Elements that are read at a time: whole blocks of every format."""

_OURS = "ours"

Read = Callable[[int, int], Tensor]
"""``read(start, stop)``: those elements of the flattened tensor, in fp32."""


def weight(tensor: SavedTensor, state: Mapping[str, Any]) -> Read:
    """A reader of a weight in fp32, decoded with the master in ``state``, if any."""
    saved, kind = _master(tensor, state)
    if kind == SUM:
        (rest,) = saved.values()
        return lambda start, stop: tensor.read(start, stop).float() + rest.read(start, stop)
    if kind != _OURS:
        (whole,) = saved.values() if kind == MASTER else (tensor,)
        return lambda start, stop: whole.read(start, stop).float()

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
    """Whether :func:`weight` reads more bits than the parameter has."""
    return _master(tensor, state)[1] not in (None, UNREADABLE)


def hides_bits(tensor: SavedTensor, state: Mapping[str, Any]) -> bool:
    """Whether ``state`` has bits of the weight in a form that is unknown here."""
    return _master(tensor, state)[1] == UNREADABLE


def _master(
    tensor: SavedTensor, state: Mapping[str, Any]
) -> tuple[dict[str, SavedTensor], str | None]:
    """The tensors with more bits of a weight, and what they are; None if there are none."""
    if tensor.dtype.itemsize >= torch.float32.itemsize:
        return {}, None
    tensors = {k: each for k, each in state.items() if isinstance(each, SavedTensor)}
    ours = {key: each for key, each in tensors.items() if key in MASTERS}
    if ours and tensor.dtype == torch.bfloat16:
        fits = all(each.shape == tensor.shape for each in ours.values())
        return ours, _OURS if fits else UNREADABLE
    others = {key: each for key, each in tensors.items() if each.numel == tensor.numel}
    kinds = {kind: key for key in others if (kind := extra_bits(key)) and key not in MASTERS}
    for kind in (MASTER, SUM, UNREADABLE):
        if kind in kinds:
            return {kinds[kind]: others[kinds[kind]]}, kind
    return {}, None


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
    readers = []
    for key, plane in planes:
        each = state[key]
        blocks = -(-prod(shape) // plane.block)
        if not isinstance(each, (SavedTensor, Tensor)) or prod(each.shape) != blocks:
            return None
        # Single numbers are read with the file.
        readers.append(each.read if isinstance(each, SavedTensor) else partial(_elements, each))

    def read(start: int, stop: int) -> Tensor:
        pieces = [
            of_plane(start // plane.block, -(-stop // plane.block))
            for of_plane, (_, plane) in zip(readers, planes, strict=True)
        ]
        return format_.decode(pieces)

    return read


def _elements(tensor: Tensor, start: int, stop: int) -> Tensor:
    return tensor.detach().flatten()[start:stop].clone()
