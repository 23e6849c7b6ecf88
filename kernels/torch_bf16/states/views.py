"""Bits that are no number, as a state dict shows them: the same memory, under another name.

Kernels read 16 bits that are no number, as int16. torch's collectives (gloo, NCCL) know no 16-bit
integers, so that nothing could gather, scatter or broadcast such a state. What only moves tensors
keeps all patterns of a bf16 tensor, NaNs included. A key says which bits it holds, because
``torch.distributed.checkpoint`` copies into what is there and converts numbers where dtypes differ.
Codes of moments go by the moment's key, which other formats have, too: there a dimension more says
it, for shapes it does compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bf16.formats import INT8, ROLES, UINT8
from torch_bf16.sharding import local, place_like

__all__ = [
    "AS_NUMBERS",
    "MASTERS",
    "from_view",
    "masters_in",
    "to_view",
]

_PLANES = {p.suffix: p.dtype for each in ROLES["weights"].values() for p in each.planes[1:]}
_BITS = {suffix for suffix, dtype in _PLANES.items() if dtype == torch.int16}

_CODES = {INT8.planes[0].dtype, UINT8.planes[0].dtype}
_SCALE = INT8.planes[1].suffix

AS_NUMBERS = {
    suffix: f"{suffix}_fp32" for suffix, dtype in _PLANES.items() if not dtype.is_floating_point
}
"""The keys of remainders as integers in fp32, which FSDP1 can gather beside fp32 moments."""

MASTERS = sorted([*_PLANES, *AS_NUMBERS.values()])
"""The keys under which a state may hold what a weight has beyond the parameter."""


def to_view(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A parameter's state as state dicts show it; no bit is copied."""
    if not any(key in _BITS or _is_code(state, key) for key in state):
        return state
    return {
        key: _as_bf16(v)
        if key in _BITS
        else _reshaped(v, (*v.shape, 1))
        if _is_code(state, key)
        else v
        for key, v in state.items()
    }


def from_view(state: Mapping[str, Any], dims: int) -> dict[str, Any]:
    """A saved state with codes in the shape of their moments, as :func:`to_view` found them.

    Args:
        state: as it was saved.
        dims: how many dimensions the parameter has.
    """
    return {
        key: _reshaped(v, v.shape[:-1]) if _is_code(state, key) and v.ndim == dims + 1 else v
        for key, v in state.items()
    }


def masters_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a state holds of a weight beyond the parameter, as kernels read it.

    Args:
        state: in memory or as it was saved; of plain tensors.
    """
    found = {}
    for key in MASTERS:
        value = state.get(key)
        if value is None:
            continue
        dtype = getattr(value, "dtype", None)
        if key in AS_NUMBERS.values():
            # NaN stands for a format that has none.
            if not value.isnan().any():
                suffix = key.removesuffix("_fp32")
                found[suffix] = value.to(_PLANES[suffix])
            continue
        if key in _BITS and dtype == torch.bfloat16:
            value = value.view(torch.int16)
        found[key] = value
    return found


def _as_bf16(tensor: Any) -> Any:
    if getattr(tensor, "dtype", None) != torch.int16:
        return tensor
    return place_like(tensor, local(tensor).view(torch.bfloat16))


def _is_code(state: Mapping[str, Any], key: str) -> bool:
    return getattr(state[key], "dtype", None) in _CODES and f"{key}_{_SCALE}" in state


def _reshaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    memory = local(tensor)
    memory = memory.unsqueeze(-1) if len(shape) > tensor.ndim else memory.squeeze(-1)
    return place_like(tensor, memory, torch.Size(shape))
