"""The elements of a whole tensor that lie in a rank's memory.

The noise of an element is keyed by its index in the whole tensor, so that training does not depend
on how the tensor is cut. A rank holds equally long runs of elements at equal distances: ``offset``,
``width`` and ``pitch`` say where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

__all__ = ["Span", "runs_of"]


@dataclass(frozen=True, slots=True)
class Span:
    """Elements of one whole tensor in a parameter's memory on this rank.

    Local element ``e``, counted from ``start``, is element
    ``offset + (e // width) * pitch + e % width`` of the whole tensor in row-major order.

    Attributes:
        name: the name of the whole tensor, which keys the noise.
        shape: shape of the whole tensor.
        start: position of the span's first element in the parameter's local memory.
        numel: number of elements.
        offset: index of the first element in the whole tensor.
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

    @classmethod
    def of_whole(cls, name: str, shape: Sequence[int]) -> Span:
        """All elements of a tensor."""
        numel = prod(shape)
        return cls(name, tuple(shape), 0, numel, 0, max(numel, 1), max(numel, 1))

    @property
    def strided(self) -> bool:
        """Whether there is more than one run."""
        return self.width < self.numel

    def split(self) -> list[Span]:
        """The same elements as spans whose runs a kernel can count in 32 bits."""
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

    def of(self, memory: Tensor, block: int = 1) -> Tensor:
        """The span's elements of a tensor on this rank with one element per ``block`` numbers."""
        start, numel = self.start // block, self.numel // block
        return memory if memory.numel() == numel else memory.view(-1)[start : start + numel]

    def within(self, first: int, shape: Sequence[int]) -> Span:
        """The elements of this span that lie in a stretch of the whole tensor, as a span of that.

        Args:
            first: index in the whole tensor of the stretch's first element.
            shape: shape of the stretch, such as one matrix of a stack; if there are several runs,
                each must end in the stretch in which it begins.
        """
        last = first + prod(shape)
        if not self.strided:
            begin = max(self.offset, first)
            numel = max(min(self.offset + self.numel, last) - begin, 0)
            start, width, pitch = begin - self.offset, max(numel, 1), max(numel, 1)
        else:
            runs, width, pitch = self.numel // self.width, self.width, self.pitch
            # The first run that begins at or after an index.
            skipped, end = (
                min(max(-(-(index - self.offset) // pitch), 0), runs) for index in (first, last)
            )
            begin, numel = self.offset + skipped * pitch, (end - skipped) * width
            start = skipped * width
        if not numel:
            return Span(self.name, tuple(shape), self.start, 0, 0, 1, 1)
        return Span(self.name, tuple(shape), self.start + start, numel, begin - first, width, pitch)

    def view_of(self, whole: Tensor) -> Tensor:
        """The span's elements of a contiguous whole tensor: a view ``[runs, width]``."""
        runs = self.numel // self.width
        place = whole.storage_offset() + self.offset
        return whole.as_strided((runs, self.width), (self.pitch, 1), place)

    def places(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """The elements of a smaller tensor that, expanded to the whole shape, give this span's.

        Args:
            shape: shape of the smaller tensor: 1 in dimensions in which it is expanded.
            device: device of the result.

        Returns:
            Indices into the smaller tensor in row-major order: int64 ``[numel]``.
        """
        left, stride = self.indices(device), 1
        places = torch.zeros_like(left)
        for whole, size in zip(reversed(self.shape), reversed(shape), strict=True):
            if size > 1:
                places += (left % whole).mul_(stride)
            left, stride = left.floor_divide_(whole), stride * size
        return places

    def indices(self, device: torch.device) -> Tensor:
        """The index of each element in the whole tensor: int64 ``[numel]``."""
        e = torch.arange(self.numel, device=device)
        starts = (e // self.width).mul_(self.pitch).add_(self.offset)
        return e.remainder_(self.width).add_(starts)


def runs_of(shape: Sequence[int], box: Sequence[slice]) -> tuple[int, int, int]:
    """(offset, width, pitch) of a box of a tensor, one interval per dimension; see :class:`Span`.

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
    # Runs are at equal distances only if no dimension is cut between the first one with several
    # elements and the last one that is cut.
    first = next(dim for dim, size in enumerate(sizes) if size > 1)
    cut = [dim for dim in range(first + 1, last) if sizes[dim] < shape[dim]]
    if cut:
        raise ValueError(
            f"a tensor of shape {tuple(shape)} is cut in dimensions {cut[0]} and {last}"
        )
    return offset, width, pitch
