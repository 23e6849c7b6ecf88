"""What a rank holds of a parameter: the only room that knows how others shard."""

from __future__ import annotations

from torch import Tensor

from .dtensor import DTensorShard, reshard
from .exit import settle_at_exit
from .fsdp1 import Fsdp1Shard, is_part, register, unit_shapes
from .local import is_dtensor, local, place_like, same_memory, shown_like, version_of, whole
from .many import Parameters, all_same, no_torch_function, unlike_memory
from .names import WRAPPERS, bare_name, saved_names, without_wrappers
from .shard import Shard
from .span import Span
from .wrapped import PLAIN, missing_memory

__all__ = [
    "WRAPPERS",
    "Parameters",
    "Shard",
    "Span",
    "all_same",
    "bare_name",
    "is_dtensor",
    "is_whole",
    "local",
    "missing_memory",
    "no_torch_function",
    "place_like",
    "register",
    "reshard",
    "same_memory",
    "saved_names",
    "settle_at_exit",
    "shard_of",
    "shown_like",
    "unit_shapes",
    "unlike_memory",
    "version_of",
    "whole",
    "without_wrappers",
]


def is_whole(parameter: Tensor) -> bool:
    """Whether it and its gradient, if there is one, are plain tensors that nobody has sharded."""
    return (
        type(parameter) in PLAIN
        and (parameter.grad is None or type(parameter.grad) is Tensor)
        and not is_part(parameter)
    )


def shard_of(parameter: Tensor, name: str = "") -> Shard:
    """What this rank holds of a parameter, whoever has sharded it.

    Args:
        parameter: plain, a DTensor, or what FSDP1 has left of one.
        name: what keys its noise.
    """
    kind = DTensorShard if is_dtensor(parameter) else Fsdp1Shard if is_part(parameter) else None
    if kind is None:
        return Shard(parameter, name)
    settle_at_exit()
    return kind(parameter, name)
