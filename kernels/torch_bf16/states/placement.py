"""States of a sharded parameter: this rank's part of what was saved, and placed like it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torch_bf16.errors import StateMismatchError
from torch_bf16.formats import INT8
from torch_bf16.sharding import Shard, local

__all__ = ["check_shape", "place_states", "take_states"]

(_SCALE,) = (plane for plane in INT8.planes if plane.suffix)


def take_states(state: Mapping[str, Any], shard: Shard, label: str) -> dict[str, Any]:
    """This rank's part of each entry of a state, which may be whole or placed in any way.

    Of a plain parameter it is all; a sharded tensor is then gathered, which communicates on every
    rank. What is no tensor stays as it is, and so does ``step``.

    Raises:
        StateMismatchError: a tensor has another shape than the parameter.
    """
    taken = dict(state)
    for key, saved in state.items():
        if key == "step" or not isinstance(saved, Tensor):
            continue
        if shard.sharded and not (shard.takes_parts and saved.shape == shard.memory.shape):
            check_shape(saved, shard.shape, key, label, _whole_shape(key, shard))
        taken[key] = shard.take(saved)
    return taken


def place_states(here: Mapping[str, Any], given: Mapping[str, Any], shard: Shard) -> dict[str, Any]:
    """This rank's parts of a state, placed like the parameter.

    Args:
        here: by name; what is no tensor stays as it is, and so does ``step``.
        given: what they were made from: what is in place already stays the tensor it is.
        shard: of the parameter.
    """
    return {
        key: each
        if key == "step" or not isinstance(each, Tensor)
        else given[key]
        if key in given and local(given[key]) is each
        else shard.place(each, _whole_shape(key, shard))
        for key, each in here.items()
    }


def check_shape(
    saved: Any,
    shape: Sequence[int],
    key: str,
    label: str,
    expected: Sequence[int] | None = None,
) -> None:
    """Refuse a state of another shape than the parameter's, or than ``expected``.

    Raises:
        StateMismatchError: it is of another model.
    """
    expected = tuple(shape if expected is None else expected)
    if not isinstance(saved, Tensor) or tuple(saved.shape) != expected:
        found = tuple(saved.shape) if isinstance(saved, Tensor) else type(saved).__name__
        raise StateMismatchError(
            f"{key} of {label} has shape {found} in the state dict and the parameter has shape "
            f"{tuple(shape)}; it was saved from another model"
        )


def _whole_shape(key: str, shard: Shard) -> tuple[int, ...]:
    """The shape of a state of the whole parameter: scales are fewer than numbers."""
    return _SCALE.shape(shard.shape) if key.endswith(f"_{_SCALE.suffix}") else shard.shape
