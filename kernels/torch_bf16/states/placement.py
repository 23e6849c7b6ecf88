"""States of a sharded parameter: this rank's part of what was saved, and placed like it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bf16.errors import StateMismatchError
from torch_bf16.formats import INT8
from torch_bf16.sharding.dtensor import is_dtensor, local, local_part, place_like

__all__ = ["check_shape", "local_state", "placed_states"]


def local_state(key: str, saved: Any, parameter: Tensor, label: str) -> Any:
    """This rank's part of one entry of a state, which may be whole or placed in any way.

    Of a plain parameter it is all; a DTensor is then gathered, which communicates on every rank.

    Raises:
        StateMismatchError: it has another shape than the parameter.
    """
    if key == "step" or not isinstance(saved, Tensor):
        return saved
    if not is_dtensor(parameter):
        placed: Any = saved
        return placed.full_tensor() if is_dtensor(saved) else saved
    check_shape(saved, parameter, key, label, _whole_shape(key, parameter))
    return local_part(saved, parameter)


def placed_states(
    local_ones: Mapping[str, Any], given: Mapping[str, Any], parameter: Tensor
) -> dict[str, Any]:
    """This rank's parts of a state as DTensors placed like the parameter, where it is one.

    Args:
        local_ones: by name; what is no tensor stays as it is, and so does ``step``.
        given: what they were made from: what is in place already stays the tensor it is.
        parameter: plain or a DTensor.
    """
    if not is_dtensor(parameter):
        return dict(local_ones)
    return {
        key: each
        if key == "step" or not isinstance(each, Tensor)
        else given[key]
        if key in given and local(given[key]) is each
        else place_like(parameter, each, _whole_shape(key, parameter))
        for key, each in local_ones.items()
    }


def check_shape(
    saved: Any, parameter: Tensor, key: str, label: str, shape: Sequence[int] | None = None
) -> None:
    """Refuse a state of another shape than the parameter, or than ``shape``.

    Raises:
        StateMismatchError: it is of another model.
    """
    expected = tuple(parameter.shape if shape is None else shape)
    if not isinstance(saved, Tensor) or tuple(saved.shape) != expected:
        found = tuple(saved.shape) if isinstance(saved, Tensor) else type(saved).__name__
        raise StateMismatchError(
            f"{key} of {label} has shape {found} in the state dict and the parameter has shape "
            f"{tuple(parameter.shape)}; it was saved from another model, nothing was changed"
        )


def _whole_shape(key: str, parameter: Tensor) -> torch.Size:
    """The shape of a state of the whole parameter: scales are fewer than numbers."""
    (scale,) = (plane for plane in INT8.planes if plane.suffix)
    fewer = key.endswith(f"_{scale.suffix}")
    return torch.Size(scale.shape(parameter.shape)) if fewer else parameter.shape
