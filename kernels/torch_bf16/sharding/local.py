"""The memory of any tensor on this rank, and tensors placed like another."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

__all__ = ["is_dtensor", "local", "place_like", "same_memory", "version_of", "whole"]


def is_dtensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor; does not import what defines those."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The memory of a tensor on this rank: that of a DTensor, or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def version_of(tensor: Tensor) -> int:
    """A number that a write to the tensor raises, by its own name or in its memory on this rank."""
    memory = local(tensor)
    return tensor._version if memory is tensor else tensor._version + memory._version


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or the whole one that a DTensor is a part of, gathered on every rank."""
    placed: Any = tensor
    return placed.full_tensor() if is_dtensor(tensor) else tensor


def place_like(tensor: Tensor, memory: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """A tensor placed like another.

    Args:
        tensor: plain or a DTensor.
        memory: this rank's part, any dtype.
        shape: of the whole result, where it is not that of ``tensor``.

    Returns:
        ``memory`` itself beside a plain tensor, else a DTensor over it.
    """
    if not is_dtensor(tensor):
        return memory
    from torch.distributed.tensor import DTensor

    placed: Any = tensor
    shape = torch.Size(tensor.shape if shape is None else shape)
    # Without shape and stride an uneven shard would be taken for an even one.
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        memory, placed.device_mesh, placed.placements, run_check=False, shape=shape, stride=stride
    )


def same_memory(given: Any, own: Any) -> bool:
    """Whether two tensors are one and the same, seen through two objects."""
    if not isinstance(given, Tensor) or not isinstance(own, Tensor):
        return False
    if given is own:
        return True
    return given.shape == own.shape and not local(own).is_meta and _place(given) == _place(own)


def _place(tensor: Any) -> tuple[Any, ...]:
    """What two tensors share where they are one and the same."""
    memory = local(tensor)
    placements = tensor.placements if is_dtensor(tensor) else None
    kind = memory.dtype, memory.device, memory.data_ptr()
    return placements, memory.shape, memory.stride(), *kind
