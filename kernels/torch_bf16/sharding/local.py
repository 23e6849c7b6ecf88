"""The memory of any tensor on this rank, and tensors placed like another."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .wrapped import PLAIN, inner_of

__all__ = [
    "as_real",
    "is_dtensor",
    "layers",
    "local",
    "place_like",
    "same_memory",
    "shown_like",
    "version_of",
    "versions_of",
    "whole",
]

_VERSION = attrgetter("_version")


def is_dtensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor; does not import the module that defines them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def layers(tensor: Tensor) -> list[Tensor]:
    """A tensor, the tensor inside it, and so on down to its memory on this rank.

    A DTensor has a local tensor; a tensor of another library's class, such as torchao's float8
    weight, may hold the one whose numbers it shows.
    """
    nested = [tensor]
    while type(nested[-1]) not in PLAIN:
        inner = getattr(nested[-1], "_local_tensor", None)
        if inner is None:
            inner = inner_of(nested[-1])
        if inner is None:
            break
        nested.append(inner)
    return nested


def local(tensor: Tensor) -> Tensor:
    """The memory of a tensor on this rank: the last of its :func:`layers`."""
    return tensor if type(tensor) in PLAIN else layers(tensor)[-1]


def as_real(memory: Tensor) -> Tensor:
    """The numbers in memory as kernels see them: complex ones as pairs of real ones.

    Args:
        memory: a tensor, perhaps lazily conjugated; then the result is a copy.

    Returns:
        ``memory`` itself if it is real, else a real view with one more dimension, of size 2.
    """
    return torch.view_as_real(memory.resolve_conj()) if memory.is_complex() else memory


def version_of(tensor: Tensor) -> int:
    """A number that a write to the tensor, or to one of its layers, raises."""
    if type(tensor) in PLAIN:
        return tensor._version
    # A write to a wrapper does not change the version of the tensor inside.
    return sum(each._version for each in layers(tensor))


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """:func:`version_of` each tensor."""
    plain = {*map(type, tensors)} <= {*PLAIN}
    return [*map(_VERSION if plain else version_of, tensors)]


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself or, for a DTensor, the whole tensor, gathered on every rank."""
    placed: Any = tensor
    if not is_dtensor(tensor):
        return tensor
    device = placed.device_mesh.device_type
    # States in host memory move to the mesh's devices, which have the collectives.
    return (placed if placed.device.type == device else placed.to(device)).full_tensor()


def place_like(tensor: Tensor, memory: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """A tensor placed like another.

    Args:
        tensor: a plain tensor or a DTensor.
        memory: this rank's part, of any dtype.
        shape: shape of the whole result, if it differs from that of ``tensor``.

    Returns:
        ``memory`` itself if ``tensor`` is plain, otherwise a DTensor over it.
    """
    if not is_dtensor(tensor):
        return memory
    from torch.distributed.tensor import DTensor

    placed: Any = tensor
    shape = torch.Size(tensor.shape if shape is None else shape)
    # Without shape and stride an uneven shard would be taken for an even one.
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    if memory.shape == shape and not memory.is_contiguous():
        stride = memory.stride()
    beside = memory.device.type not in ("meta", placed.device_mesh.device_type)
    made: Any = DTensor.from_local(
        # from_local would move host memory to the mesh's device.
        torch.empty_like(memory, device="meta") if beside else memory,
        placed.device_mesh,
        placed.placements,
        run_check=False,
        shape=shape,
        stride=stride,
    )
    if beside:
        names, spec = made.__tensor_flatten__()
        inner = {name: getattr(made, name) for name in names} | {"_local_tensor": memory}
        made = DTensor.__tensor_unflatten__(inner, spec, shape, stride)
    return made


def shown_like(tensor: Tensor, memory: Tensor) -> Tensor:
    """A tensor with the layers of another tensor, but other numbers of the same shape.

    Args:
        tensor: plain, a DTensor, or wrapped by another library, or both.
        memory: this rank's part, of any floating-point dtype; may become the result's memory.
    """
    if all(type(each) in PLAIN or is_dtensor(each) for each in layers(tensor)):
        return place_like(tensor, memory)
    # A wrapper decides by itself what it becomes in another dtype.
    shown = tensor.to(memory.dtype)
    local(shown).copy_(memory)
    return shown


def same_memory(one: Any, other: Any) -> bool:
    """Whether two tensor objects show the same tensor."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    if one is other:
        return True
    comparable = one.shape == other.shape and one.layout == torch.strided
    return comparable and not local(other).is_meta and _place(one) == _place(other)


def _place(tensor: Any) -> tuple[Any, ...]:
    """A key that is equal for two objects that show the same tensor."""
    memory = local(tensor)
    placements = tensor.placements if is_dtensor(tensor) else None
    kind = memory.dtype, memory.device, memory.data_ptr()
    return placements, memory.shape, memory.stride(), *kind
