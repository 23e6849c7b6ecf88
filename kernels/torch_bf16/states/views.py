"""A parameter's state as state dicts show it: bits that are not a number, and numbers in fp32.

Kernels read a 16-bit remainder, which is not a number, as int16. torch's collectives (gloo, NCCL)
do not support 16-bit integers, so that such a state could not be gathered, scattered or broadcast.
State dicts show it as bf16, in the same memory: code that only moves tensors keeps all bit
patterns, NaNs included. Each kind of remainder has its own key, because
``torch.distributed.checkpoint`` copies into existing tensors and converts numbers if dtypes differ.
Codes of moments are stored under the moment's key, as in other formats; an extra dimension tells
them apart, because that module does compare shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_bf16.formats import ROLES
from torch_bf16.rules import FIRST_MOMENT, SECOND_MOMENT
from torch_bf16.sharding import is_dtensor, local, place_like, shard_of

from .recoding import BESIDE_WEIGHTS, stored_format

__all__ = [
    "COUNTER",
    "MASTERS",
    "MOMENTS",
    "fp32_numbers",
    "from_view",
    "gatherable",
    "is_stand_in",
    "masters_in",
    "planes_of_master",
    "to_view",
]

_PLANES = {plane.suffix: plane.dtype for _, plane in BESIDE_WEIGHTS}
_BITS = {suffix for suffix, dtype in _PLANES.items() if dtype == torch.int16}
# Remainders as integers in fp32, which FSDP1 can gather beside fp32 moments.
_AS_NUMBERS = {
    suffix: f"{suffix}_fp32" for suffix, dtype in _PLANES.items() if not dtype.is_floating_point
}

MOMENTS = {each for role in (FIRST_MOMENT, SECOND_MOMENT) for each in ROLES[role].values()}
"""The formats of moments."""
# Of codes, and what the plane beside them is called: a tensor alone may be the user's own.
_CODES = {
    (each.planes[0].dtype, plane.suffix)
    for each in MOMENTS
    for plane in each.planes[1:]
    if not each.planes[0].dtype.is_floating_point
}

MASTERS = frozenset({*_PLANES, *_AS_NUMBERS.values()})
"""The keys under which a state may hold planes of the weight beside the parameter."""

COUNTER = "noise_step"
"""The state of optimizers that step by their own code: the number of the next draw, an int."""


def to_view(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state as state dicts show it; no bit is copied."""
    shown = dict(state)
    for key, value in state.items():
        if key in _BITS and getattr(value, "dtype", None) == torch.int16:
            shown[key] = place_like(value, local(value).view(torch.bfloat16))
        elif _is_code(state, key):
            shown[key] = place_like(value, local(value).unsqueeze(-1), (*value.shape, 1))
    return shown


def from_view(state: Mapping[str, Any], dims: int) -> dict[str, Any]:
    """A saved state with codes in the shape of their moments, as they were before :func:`to_view`.

    Args:
        state: the state as it was saved.
        dims: number of the parameter's dimensions.
    """
    restored = dict(state)
    for key, value in state.items():
        if _is_code(state, key) and value.ndim == dims + 1:
            restored[key] = place_like(value, local(value).squeeze(-1), value.shape[:-1])
    return restored


def _is_code(state: Mapping[str, Any], key: str) -> bool:
    dtype = getattr(state[key], "dtype", None)
    return any(dtype == codes and f"{key}_{suffix}" in state for codes, suffix in _CODES)


def planes_of_master(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a state that are parts of the weight."""
    return {key: state[key] for key in MASTERS & state.keys()}


def masters_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of the planes of a weight, beside the parameter, as kernels read them.

    Args:
        state: a state in memory, or as it was saved.
    """
    saved = {key: local(each) for key, each in planes_of_master(state).items()}
    masters = {}
    for key, dtype in _PLANES.items():
        value: Any = saved.get(key)
        number = saved.get(_AS_NUMBERS.get(key, ""))
        if key in _BITS and getattr(value, "dtype", None) == torch.bfloat16:
            value = value.view(dtype)
        # NaN means that the parameter's format has no such plane; of no elements it cannot be told,
        # nor does it matter.
        if number is not None and number.numel() and not number.isnan().any():
            value = number.to(dtype)
        if value is not None:
            masters[key] = value
    return masters


def fp32_numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """New fp32 tensors with the numbers that a state holds, exactly; masters are left out."""
    formats = {k: known for k in state if k not in MASTERS and (known := stored_format(state, k))}
    planes = {key: each.plane_names(key) for key, each in formats.items()}
    left_out = {*MASTERS, *(name for _, *rest in planes.values() for name in rest)}
    # Copies, because torch's load_state_dict would keep using this optimizer's own tensors.
    numbers = {
        key: place_like(state[key], formats[key].decode([local(state[n]) for n in names]).clone())
        for key, names in planes.items()
    }
    tensors = {k: each for k, each in state.items() if isinstance(each, Tensor)}
    numbers |= {k: each.clone() for k, each in tensors.items() if each.is_complex()}
    return {key: numbers.get(key, each) for key, each in state.items() if key not in left_out}


def is_stand_in(value: Any) -> bool:
    """Whether an entry exists only because FSDP1 needs one: all NaN, from :func:`gatherable`."""
    # FSDP1 has no DTensors; and of a DTensor, ranks with other parts could decide otherwise.
    if not isinstance(value, Tensor) or is_dtensor(value) or value.dtype != torch.float32:
        return False
    return value.numel() > 0 and bool(value.isnan().all())


def gatherable(
    state: Mapping[str, Any],
    parameter: Tensor,
    names: Collection[str],
    planes: Collection[str],
) -> dict[str, Any]:
    """The state of a parameter that FSDP1 has flattened, in a form that FSDP1 can gather.

    FSDP1 gathers the states of a unit's parameters as if they were one tensor: all must have one
    dtype, and every parameter the same keys. So all states become fp32, with the parameter's shape,
    and every state or plane that any parameter of the unit has is added to all of them, filled with
    NaN where there is none. No bit is lost.

    Args:
        state: the parameter's state.
        parameter: this rank's part of the parameter, as FSDP1 shows it.
        names: names of the states that rules keep for the parameters of the unit.
        planes: names of the planes that their formats keep beside them.
    """
    gathered = fp32_numbers(state)
    if COUNTER in gathered:
        # FSDP1 sends states that only rank 0 has, and takes each for a tensor.
        gathered[COUNTER] = torch.tensor(gathered[COUNTER], device="cpu")
    stand_in = torch.full_like(parameter, torch.nan, dtype=torch.float32)
    for key in names:
        value = gathered.setdefault(key, stand_in)
        if value.shape != parameter.shape:
            places = shard_of(parameter).span.places(value.shape, value.device)
            gathered[key] = value.view(-1)[places].view(parameter.shape)
    if parameter.dtype != torch.bfloat16:
        return gathered
    for key in sorted(planes):
        shown = _AS_NUMBERS.get(key, key)
        if key in state:
            gathered[shown] = state[key].to(torch.float32, copy=True)
        else:
            gathered[shown] = stand_in
    return gathered
