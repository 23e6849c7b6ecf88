"""The memory of tensors: where it lies, and which tensors or processes share it."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

__all__ = [
    "TransposedOrder",
    "as_it_lies",
    "is_shared",
    "over_same_memory",
    "place_and_version",
    "share_like",
    "span",
    "without_gaps",
]

_T = TypeVar("_T")

# Kernels divide by rows and columns in fp32, which is exact below 2**20; a chunk comes on top.
_LONGEST_SIDE = 1 << 19
# Noise keys hold for one block of 2**32 elements.
_MOST_ELEMENTS = 1 << 32


def span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first element and of the byte behind its last one.

    They are equal for a tensor without elements, and 0 for one without memory of its own in one
    place, such as a sparse tensor.

    Example:
        >>> matrix = torch.zeros(4, 2)
        >>> start, end = span(matrix[:, 0])
        >>> end - start  # bytes: from the first of 8 numbers to the seventh
        28
    """
    in_one_place = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_nested)
    start = tensor.data_ptr() if in_one_place else 0
    if not start or not tensor.numel():
        return start, start
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def without_gaps(tensor: Tensor) -> bool:
    """Whether its elements fill a block of memory, each once, in whatever order of dimensions.

    Example:
        >>> matrix = torch.zeros(4, 2)
        >>> [without_gaps(each) for each in (matrix.t(), matrix[:, 0], matrix[:1].expand(4, 2))]
        [True, False, False]
    """
    if tensor.is_contiguous():
        return True
    expected, strides = 1, zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(pair for pair in strides if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True, slots=True)
class TransposedOrder:
    """How tensors without gaps lie in memory: as matrices, each of them transposed.

    So lie the weights of convolutions in channels_last, with a matrix
    ``[height * width, channels]`` for each output channel, and transposed views of matrices. The
    element at ``row`` and ``column`` of a matrix in memory comes at ``column * rows + row`` if the
    elements of that matrix are counted in row-major order of the tensor.

    Attributes:
        dims: the tensor's dimensions as they lie in memory, from the outermost one on.
        rows: rows of a matrix in memory.
        columns: columns of a matrix in memory.
    """

    dims: tuple[int, ...]
    rows: int
    columns: int

    @classmethod
    def of(cls, tensor: Tensor) -> TransposedOrder | None:
        """The order of a tensor; None if it is contiguous, has gaps, or lies otherwise.

        Also None for 2**32 elements and more, and for matrices with 2**19 rows or columns.

        Example:
            >>> weight = torch.zeros(8, 4, 3, 3).to(memory_format=torch.channels_last)
            >>> TransposedOrder.of(weight)
            TransposedOrder(dims=(0, 2, 3, 1), rows=9, columns=4)
        """
        if tensor.is_contiguous() or not without_gaps(tensor) or tensor.numel() >= _MOST_ELEMENTS:
            return None
        shape, stride = tensor.shape, tensor.stride()
        # The stride of a dimension of size 1 means nothing.
        units = [dim for dim, size in enumerate(shape) if size == 1]
        logical = [dim for dim, size in enumerate(shape) if size > 1]
        lying = sorted(logical, key=lambda dim: -stride[dim])
        first = next(n for n, dim in enumerate(lying) if dim != logical[n])
        last = logical.index(lying[first])
        if lying != [*logical[:first], *logical[last:], *logical[first:last]]:
            return None
        rows = prod(shape[dim] for dim in logical[last:])
        columns = prod(shape[dim] for dim in logical[first:last])
        if max(rows, columns) >= _LONGEST_SIDE:
            return None
        return cls((*units, *lying), rows, columns)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor, of as many dimensions, lies in this order."""
        return as_it_lies(tensor, self).is_contiguous()

    def back(self, lying: Tensor) -> Tensor:
        """The tensor of which :func:`as_it_lies` is ``lying``."""
        return lying.permute(tuple(map(self.dims.index, range(len(self.dims)))))


def as_it_lies(tensor: Tensor, order: TransposedOrder | None) -> Tensor:
    """A view of a tensor that is contiguous if the tensor lies in an order; None for row-major."""
    return tensor if order is None else tensor.permute(order.dims)


def over_same_memory(tensors: Iterable[tuple[_T, Tensor]]) -> Iterator[tuple[_T, _T]]:
    """The pairs of tensors that begin at the same address, or overlap and are contiguous.

    Others may lie between each other, as columns of a matrix do. The pairs are of neighbours in
    memory.

    Args:
        tensors: what is returned for each tensor, and the tensor.

    Example:
        >>> weight = torch.zeros(2, 3)
        >>> list(over_same_memory([("encoder", weight), ("decoder", weight.t())]))
        [('encoder', 'decoder')]
    """
    spans = []
    for key, each in tensors:
        start, end = span(each)
        if start < end:
            spans.append((str(each.device), start, end if each.is_contiguous() else start + 1, key))
    spans.sort(key=lambda each: each[:2])
    for (device, _, end, one), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < end:
            yield one, other


def share_like(new: Tensor, old: Tensor) -> Tensor:
    """Share a tensor with other processes if the one that it replaces is shared by them.

    Otherwise each process would train weights of its own, and the common ones would never change.
    In a process that another one has started nothing is shared: launchers send models there, which
    become replicas, and no other process could know the new memory.

    Args:
        new: the tensor that takes the place of ``old``; moved into shared memory in place.
        old: a tensor, which ``share_memory_()`` may have moved there.

    Returns:
        ``new``.

    Example:
        >>> share_like(torch.zeros(2), torch.zeros(2).share_memory_()).is_shared()
        True
    """
    if multiprocessing.parent_process() is not None:
        return new
    if type(new) is Tensor and new.is_cpu and is_shared(old):
        new.share_memory_()
    return new


def is_shared(tensor: Tensor) -> bool:
    """Whether a plain tensor, or a parameter's, is in host memory that ``share_memory_()`` shares.

    torch counts all memory of GPUs and of files as shared, too.
    """
    if type(tensor.detach()) is not Tensor or not tensor.is_cpu:
        return False
    return tensor.is_shared() and tensor.untyped_storage().filename is None


def place_and_version(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor lies, and how often it was written, but for writes through ``.data``."""
    return tensor.data_ptr(), tensor._version
