"""Parameters that are DTensors: FSDP2 (``fully_shard``), HSDP, tensor parallelism, and both.

A rank holds a box of the whole tensor, one interval per dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from .exchange import all_gather, group_of
from .local import is_dtensor, local, place_like, whole
from .shard import Shard
from .span import Span, runs_of

__all__ = ["DTensorShard", "box_at", "is_incomplete"]


def is_incomplete(tensor: Any) -> bool:
    """Whether a tensor is a DTensor of which other ranks hold other numbers."""
    if not is_dtensor(tensor):
        return False
    pairs = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return any(size > 1 and not each.is_replicate() for size, each in pairs)


class DTensorShard(Shard):
    """This rank's part of a DTensor."""

    parameter: Any
    sharded = True
    replaces_parameter = True

    @cached_property
    def span(self) -> Span:
        box = self._box
        try:
            offset, width, pitch = runs_of(self.shape, box)
        except ValueError as error:
            raise _refusal(self.parameter.placements, str(error)) from None
        numel = prod(each.stop - each.start for each in box)
        return Span(self.name, self.shape, 0, numel, offset, width, pitch)

    @cached_property
    def _box(self) -> tuple[slice, ...]:
        """This rank's part of the whole tensor, as an index into it."""
        box, shape = self._box_of(self.shape), tuple(self.memory.shape)
        if tuple(each.stop - each.start for each in box) != shape and self.memory.numel():
            why = f"its part here has shape {shape}, where {box} was expected"
            raise _refusal(self.parameter.placements, why)
        return box

    def _box_of(self, shape: Sequence[int]) -> tuple[slice, ...]:
        mesh = self.parameter.device_mesh
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return tuple(slice(0, 0) for _ in shape)
        return box_at(shape, mesh.shape, coordinate, self.parameter.placements)

    def gradient(self) -> Tensor:
        # It may be partial sums, as of a norm gain under sequence parallelism.
        return self._in_place(self.parameter.grad)

    def _in_place(self, tensor: Any) -> Tensor:
        placed = self.parameter
        if tensor._spec is not placed._spec and tensor.placements != placed.placements:
            if tensor.dtype == torch.int16:  # bits: torch's collectives do not support int16
                shown = place_like(tensor, local(tensor).view(torch.bfloat16))
                return self._in_place(shown).view(torch.int16)
            tensor = tensor.redistribute(placements=placed.placements)
        memory = tensor._local_tensor
        # The result of a collective that is still running has no memory yet, and to_local() does
        # not wait for it if gradients are off.
        return local(memory.wait() if hasattr(memory, "wait") else memory)

    def obstacle_of_gradient(self, gradient: Tensor) -> str | None:
        if not is_dtensor(gradient):
            return (
                "is a DTensor and has a gradient that is a plain tensor: give it one on the same "
                "mesh, by DTensor.from_local(...) or distribute_tensor(...)"
            )
        mesh, other = self.parameter.device_mesh, gradient.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
        if mesh != other:
            return (
                f"is placed on {mesh} and its gradient on {other}: ranks would read elements that "
                "are not theirs. Give it a gradient on the parameter's mesh"
            )
        return None

    def check_blocks(self, block: int) -> None:
        mesh, placements = self.parameter.device_mesh.shape, self.parameter.placements
        shape = self.shape
        inner = [dim for dim, each in enumerate(placements) if getattr(each, "dim", 0) > 0]
        if block == 1 or not inner:
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
                    f"int8 moments of a parameter of shape {shape} placed as {tuple(placements)} "
                    f"on a mesh of {tuple(mesh)} cannot be kept: they are encoded in blocks of "
                    f"{block} of a row, and a rank would hold pieces of some. What works: "
                    "Shard(0), pieces of whole blocks in Shard(1), or a recipe with exp_avg and "
                    "exp_avg_sq in bf16"
                )

    def take(self, saved: Tensor) -> Tensor:
        if is_dtensor(saved) and saved.device_mesh == self.parameter.device_mesh:  # pyright: ignore[reportAttributeAccessIssue]
            part = self._in_place(saved)
            if saved.placements == self.parameter.placements:  # pyright: ignore[reportAttributeAccessIssue]
                return part
            # Copies here and below, because a view would keep more than this rank's part.
            return part.clone(memory_format=torch.contiguous_format)
        saved = whole(saved)
        box = self._box if saved.shape == self.parameter.shape else self._box_of(saved.shape)
        return saved[box].clone(memory_format=torch.contiguous_format)

    def gather(self, memory: Tensor) -> Tensor:
        placed, dims = self.parameter, self.cut_over()
        mesh, placements = placed.device_mesh, placed.placements
        if not dims or not self.numel:
            return memory
        own = enumerate(mesh.get_coordinate())
        places = [range(mesh.shape[dim]) if dim in dims else [place] for dim, place in own]
        boxes = [box_at(self.shape, mesh.shape, each, placements) for each in product(*places)]
        sizes = [tuple(each.stop - each.start for each in box) for box in boxes]
        # Collectives need parts of equal size.
        most = max(map(prod, sizes))
        parts = memory.new_zeros(most)
        parts[: memory.numel()] = memory.view(-1)
        for dim in reversed(dims):
            more = parts.new_empty(mesh.shape[dim] * parts.numel())
            all_gather(more, parts, mesh.get_group(dim))
            parts = more
        result = memory.new_empty(self.shape)
        for box, size, part in zip(boxes, sizes, parts.view(-1, most), strict=True):
            result[box] = part[: prod(size)].view(size)
        return result

    def holders(self) -> Mapping[int, Span]:
        dims, mesh = self.cut_over(), self.parameter.device_mesh
        own = mesh.get_coordinate()
        if own is None or not dims:
            return {}
        spans = _spans(self.shape, tuple(mesh.shape), tuple(self.parameter.placements))
        sizes = enumerate(mesh.shape)
        places = [range(n) if dim in dims else [own[dim]] for dim, n in sizes]
        return {int(mesh.mesh[each]): spans[each] for each in product(*places)}

    def exchange_group(self) -> Any:
        groups = self.groups()
        return groups[0] if len(groups) == 1 else group_of(sorted(self.holders()))

    def cut_over(self) -> tuple[int, ...]:
        """The mesh dimensions whose ranks hold other elements."""
        placements = self.parameter.placements
        return tuple(dim for dim, each in enumerate(placements) if not each.is_replicate())

    def groups(self) -> list[Any]:
        return [self.parameter.device_mesh.get_group(dim) for dim in self.cut_over()]


@functools.lru_cache(maxsize=256)
def _spans(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: Any
) -> dict[tuple[int, ...], Span]:
    """The part of a tensor at each coordinate of a mesh."""
    spans = {}
    for coordinate in product(*map(range, mesh_shape)):
        box = box_at(shape, mesh_shape, coordinate, placements)
        numel = prod(each.stop - each.start for each in box)
        spans[coordinate] = Span("", shape, 0, numel, *runs_of(shape, box))
    return spans


def box_at(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Any
) -> tuple[slice, ...]:
    """The part of a tensor that the rank at ``coordinate`` of a mesh holds, as an index into it."""
    starts, sizes = [0] * len(shape), list(shape)
    for mesh_dim in _order(mesh_shape, placements):
        dim = placements[mesh_dim].dim
        # As torch.chunk: equal pieces, the last ones shorter or empty.
        piece = -(-sizes[dim] // mesh_shape[mesh_dim])
        first = min(piece * coordinate[mesh_dim], sizes[dim])
        starts[dim] += first
        sizes[dim] = min(piece, sizes[dim] - first)
    return tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))


def _order(mesh_shape: Sequence[int], placements: Any) -> Iterable[int]:
    """Mesh dimensions in the order in which they cut the tensor.

    That is from left to right, except for FSDP2 over tensor parallelism: FSDP2 cuts the parts of
    tensor parallelism, which is on its right, and marks that with ``_StridedShard``.
    """
    order: list[int] = []
    for mesh_dim in reversed(range(len(placements))):
        each = placements[mesh_dim]
        if each.is_replicate():
            continue
        dim, factor = getattr(each, "dim", None), getattr(each, "split_factor", 1)
        if dim is None:
            raise _refusal(placements, f"{each} leaves no element whole")
        before = prod(mesh_shape[i] for i in order if placements[i].dim == dim)
        if factor == 1:
            order.insert(0, mesh_dim)
        elif factor == before:
            order.append(mesh_dim)
        else:
            raise _refusal(placements, f"{each} does not cut what {before} ranks on its right hold")
    return order


def _refusal(placements: Any, why: str) -> NotImplementedError:
    return NotImplementedError(
        f"a parameter placed as {tuple(placements)} cannot be trained: {why}. What works: "
        "Replicate, Shard(0) or Shard(1) of a matrix, FSDP2 over tensor parallelism, and whatever "
        "else leaves a rank equally long runs of elements at equal distances"
    )
