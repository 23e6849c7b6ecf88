"""Which elements of a whole tensor a rank holds, and tensors placed like a parameter.

The noise of an element is keyed by its index in the whole tensor, so that training does not depend
on how that is cut up. A rank holds a box of it, one interval per dimension (DTensor), whose memory
is equally long runs at equal distances: ``offset``, ``width`` and ``pitch`` say where they lie.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "Span",
    "box_at",
    "box_of",
    "check_blocks",
    "check_whole_blocks",
    "cut_over",
    "gather",
    "is_dtensor",
    "local",
    "local_gradient",
    "local_part",
    "place_like",
    "runs_of",
    "span_of",
    "version_of",
]


@dataclass(frozen=True)
class Span:
    """Elements of one whole tensor in a parameter's memory on this rank.

    Local element ``e``, counted from ``start``, is element
    ``offset + (e // width) * pitch + e % width`` of the whole tensor in row-major order.

    Attributes:
        name: what keys the noise: the name of the whole tensor.
        shape: of the whole tensor.
        start: number of the first of them in the parameter's local memory.
        numel: how many there are.
        offset: index of the first one in the whole tensor.
        width: elements per contiguous run, at least 1.
        pitch: elements of the whole tensor from the start of a run to the start of the next.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    offset: int
    width: int
    pitch: int

    @property
    def strided(self) -> bool:
        """Whether there is more than one run."""
        return self.width < self.numel

    def short(self) -> list[Span]:
        """The same in spans whose runs a kernel can count in 32 bits."""
        if not self.strided or self.width < 2**30:
            return [self]
        return [
            replace(
                self,
                start=self.start + run * self.width,
                numel=self.width,
                offset=self.offset + run * self.pitch,
            )
            for run in range(self.numel // self.width)
        ]


def is_dtensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor; does not import what defines those."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The memory of a tensor on this rank: that of a DTensor, or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def version_of(parameter: Tensor) -> int:
    """A number that a write to the parameter raises: by its own name or in its local shard."""
    memory = getattr(parameter, "_local_tensor", None)
    return parameter._version if memory is None else parameter._version + memory._version


def local_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    """What this rank needs of a DTensor's gradient.

    Args:
        parameter: a DTensor.
        gradient: its gradient, which may still be spread in another way: partial sums, say, of a
            norm gain under sequence parallelism. It is then brought into place, which communicates
            on every rank.
    """
    placed: Any = gradient
    whole: Any = parameter
    if placed._spec is not whole._spec and placed.placements != whole.placements:
        placed = placed.redistribute(placements=whole.placements)
    memory = placed._local_tensor
    # What a collective that is still under way leaves here has no memory yet, and to_local() does
    # not wait for it where gradients are off.
    return memory.wait() if hasattr(memory, "wait") else memory


def cut_over(parameter: Tensor) -> tuple[Any, tuple[int, ...]]:
    """The mesh of a DTensor, and the numbers of its dimensions whose ranks hold other elements."""
    placed: Any = parameter
    dims = (dim for dim, each in enumerate(placed.placements) if not each.is_replicate())
    return placed.device_mesh, tuple(dims)


def box_of(parameter: Tensor) -> tuple[slice, ...]:
    """The part of the whole tensor that this rank holds, as an index into it.

    Raises:
        NotImplementedError: its elements do not form a box; the message says what works.
    """
    if not is_dtensor(parameter):
        return tuple(slice(0, size) for size in parameter.shape)
    mesh, placements = parameter.device_mesh, parameter.placements  # pyright: ignore[reportAttributeAccessIssue]
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return tuple(slice(0, 0) for _ in parameter.shape)
    box = box_at(tuple(parameter.shape), mesh.shape, coordinate, placements)
    found = tuple(local(parameter).shape)
    if tuple(each.stop - each.start for each in box) != found and local(parameter).numel():
        raise _refused(placements, f"its part here has shape {found}, where {box} was expected")
    return box


def box_at(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Any
) -> tuple[slice, ...]:
    """The box of the rank at ``coordinate`` of a mesh; see :func:`box_of`."""
    starts, sizes = [0] * len(shape), list(shape)
    for mesh_dim in _order(mesh_shape, placements):
        dim = placements[mesh_dim].dim
        # As torch.chunk: equal pieces, the last ones shorter or empty.
        piece = -(-sizes[dim] // mesh_shape[mesh_dim])
        first = min(piece * coordinate[mesh_dim], sizes[dim])
        starts[dim] += first
        sizes[dim] = min(piece, sizes[dim] - first)
    return tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))


def _order(mesh_shape: Sequence[int], placements: Any) -> list[int]:
    """Mesh dimensions in the order in which they cut the tensor.

    That is from left to right, but for FSDP2 over tensor parallelism: it cuts what tensor
    parallelism on its right has cut already, and says so by ``_StridedShard``.
    """
    order: list[int] = []
    for mesh_dim in reversed(range(len(placements))):
        each = placements[mesh_dim]
        if each.is_replicate():
            continue
        dim, factor = getattr(each, "dim", None), getattr(each, "split_factor", 1)
        if dim is None or each.is_partial():
            raise _refused(placements, f"{each} leaves no element whole")
        before = prod(mesh_shape[i] for i in order if placements[i].dim == dim)
        if factor == 1:
            order.insert(0, mesh_dim)
        elif factor == before:
            order.append(mesh_dim)
        else:
            raise _refused(placements, f"{each} does not cut what {before} ranks on its right hold")
    return order


def gather(parameter: Tensor, memory: Tensor) -> Tensor:
    """The whole tensor from the parts that ranks hold; communicates on all of them.

    Args:
        parameter: a DTensor, which says how the tensor is cut.
        memory: this rank's part, contiguous, of a dtype that collectives know.

    Returns:
        ``memory`` itself where it is all, else a new tensor.
    """
    mesh, dims = cut_over(parameter)
    shape, placements = tuple(parameter.shape), parameter.placements  # pyright: ignore[reportAttributeAccessIssue]
    if not dims or not prod(shape):
        return memory
    boxes = []
    for places in product(*(range(mesh.shape[dim]) for dim in dims)):
        coordinate = [*mesh.get_coordinate()]
        for dim, place in zip(dims, places, strict=True):
            coordinate[dim] = place
        boxes.append(box_at(shape, mesh.shape, coordinate, placements))
    sizes = [tuple(each.stop - each.start for each in box) for box in boxes]
    # Collectives take parts of one size.
    most = max(map(prod, sizes))
    parts = memory.new_zeros(most)
    parts[: memory.numel()] = memory.view(-1)
    for dim in reversed(dims):
        more = parts.new_empty(mesh.shape[dim] * parts.numel())
        dist.all_gather_into_tensor(more, parts, group=mesh.get_group(dim))
        parts = more
    whole = memory.new_empty(shape)
    for box, size, part in zip(boxes, sizes, parts.view(-1, most), strict=True):
        whole[box] = part[: prod(size)].view(size)
    return whole


def span_of(parameter: Tensor, name: str) -> Span:
    """Where the elements of a parameter lie in the whole tensor.

    Args:
        parameter: a plain tensor, which is the whole one, or a DTensor.
        name: what keys its noise.

    Raises:
        NotImplementedError: they are no equally long runs at equal distances.
    """
    shape, box = tuple(parameter.shape), box_of(parameter)
    try:
        offset, width, pitch = runs_of(shape, box)
    except ValueError as error:
        raise _refused(parameter.placements, str(error)) from None  # pyright: ignore[reportAttributeAccessIssue]
    numel = prod(each.stop - each.start for each in box)
    return Span(name, shape, 0, numel, offset, width, pitch)


def runs_of(shape: Sequence[int], box: Sequence[slice]) -> tuple[int, int, int]:
    """(offset, width, pitch) of a box of a tensor; see :class:`Span`.

    Raises:
        ValueError: its runs do not lie at equal distances.
    """
    sizes = [each.stop - each.start for each in box]
    numel = prod(sizes)
    if numel in (0, prod(shape)):
        return 0, max(numel, 1), max(numel, 1)
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offset = sum(each.start * stride for each, stride in zip(box, strides, strict=True))
    last = max(dim for dim, size in enumerate(shape) if sizes[dim] < size)
    width, pitch = sizes[last] * strides[last], shape[last] * strides[last]
    if width == numel:
        return offset, width, width
    # What is cut before that must be one stretch of memory, but for its own elements.
    first = next(dim for dim, size in enumerate(sizes) if size > 1)
    cut = [dim for dim in range(first + 1, last) if sizes[dim] < shape[dim]]
    if cut:
        raise ValueError(
            f"a tensor of shape {tuple(shape)} is cut in dimensions {cut[0]} and {last}"
        )
    return offset, width, pitch


def check_blocks(parameter: Tensor, block: int) -> None:
    """Refuse a DTensor that is cut within the blocks of a format; every rank comes to the same.

    Args:
        parameter: a DTensor whose rows are whole blocks.
        block: numbers per block.

    Raises:
        NotImplementedError: a rank's part has a piece of a block; the message says what works.
    """
    placed: Any = parameter
    mesh, placements, shape = placed.device_mesh.shape, placed.placements, tuple(parameter.shape)
    inner = [dim for dim, each in enumerate(placements) if getattr(each, "dim", 0) > 0]
    if not inner:
        return
    of_blocks = (shape[0], prod(shape[1:]) // block)
    for coordinate in product(*(range(n if d in inner else 1) for d, n in enumerate(mesh))):
        box = box_at(shape, mesh, coordinate, placements)
        if any(each.stop == each.start for each in box):
            continue
        offset, width, _ = runs_of(shape[1:], box[1:])
        count = prod(each.stop - each.start for each in box[1:])
        beyond = any(placements[dim].dim > 1 for dim in inner)
        expected = slice(offset // block, (offset + count) // block)
        split = beyond or width < count or offset % block or count % block
        if split or box_at(of_blocks, mesh, coordinate, placements)[1] != expected:
            raise NotImplementedError(
                f"int8 moments of a parameter of shape {shape} placed as {tuple(placements)} on a "
                f"mesh of {tuple(mesh)} cannot be kept: they are encoded in blocks of {block} of a "
                f"row, and a rank would hold pieces of some. What works: Shard(0), pieces of whole "
                f"blocks in Shard(1), or a recipe with exp_avg and exp_avg_sq in bf16. Nothing was "
                "updated"
            )


def check_whole_blocks(span: Span, block: int) -> None:
    """Refuse elements of a tensor that do not start and end with a block.

    Raises:
        NotImplementedError: they do not.
    """
    if span.numel and (span.offset % block or span.width % block or span.pitch % block):
        raise NotImplementedError(
            f"int8 moments of {span.name!r} cannot be kept: they are encoded in blocks of {block}, "
            f"and this rank holds {span.width} elements from {span.offset} on, which cuts some. "
            "Use a recipe with exp_avg and exp_avg_sq in bf16. Nothing was updated"
        )


def local_part(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor that belongs to a DTensor parameter.

    Args:
        tensor: whole, or a DTensor; placed in another way than the parameter it is brought into
            place, which communicates on every rank.
        parameter: a DTensor of the same shape, or of one with as many rows.
    """
    whole: Any = parameter
    if is_dtensor(tensor):
        placed: Any = tensor
        if placed.device_mesh == whole.device_mesh:
            return local_gradient(parameter, placed)
        tensor = placed.full_tensor()
    box = box_of(parameter)
    if tensor.shape != parameter.shape:
        mesh: Any = whole.device_mesh
        box = box_at(tensor.shape, mesh.shape, mesh.get_coordinate(), whole.placements)
    # A copy, because a view would keep the whole tensor.
    return tensor[box].clone(memory_format=torch.contiguous_format)


def place_like(parameter: Tensor, memory: Tensor, shape: torch.Size | None = None) -> Tensor:
    """A tensor placed like a parameter.

    Args:
        parameter: plain or a DTensor.
        memory: this rank's part, any dtype.
        shape: of the whole result, where it is not the parameter's.

    Returns:
        ``memory`` itself beside a plain parameter, else a DTensor over it.
    """
    if not is_dtensor(parameter):
        return memory
    from torch.distributed.tensor import DTensor

    whole: Any = parameter
    shape = torch.Size(parameter.shape if shape is None else shape)
    # Without shape and stride an uneven shard would be taken for an even one.
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        memory, whole.device_mesh, whole.placements, run_check=False, shape=shape, stride=stride
    )


def _refused(placements: Any, why: str) -> NotImplementedError:
    return NotImplementedError(
        f"a parameter placed as {tuple(placements)} cannot be trained: {why}. What works: "
        "Replicate, Shard(0) or Shard(1) of a matrix, FSDP2 over tensor parallelism, and whatever "
        "else leaves a rank equally long runs of elements at equal distances. Nothing was updated"
    )
