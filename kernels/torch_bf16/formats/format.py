"""What a storage format is: how one number is kept between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

__all__ = ["Format", "Plane"]


@dataclass(frozen=True)
class Plane:
    """One of the tensors a format stores a number in.

    Attributes:
        suffix: what the plane is called beside the number it belongs to; empty for the first one,
            which carries the number's own name (a weight's first plane is the parameter itself).
        dtype: its dtype.
        block: how many numbers share one of its elements; blocks follow one another in the
            row-major order of the whole tensor.
    """

    suffix: str
    dtype: torch.dtype
    block: int = 1

    def shape(self, of: Sequence[int]) -> tuple[int, ...]:
        """The plane's shape for numbers of shape ``of``.

        If numbers share elements, it is ``(of[0], numbers per row / block)``, so that the plane can
        be cut in dimension 0 wherever the numbers are.
        """
        return tuple(of) if self.block == 1 else (of[0], prod(of[1:]) // self.block)


@dataclass(frozen=True)
class Format:
    """A storage format in its eager dialect; other backends have their own, with the same bits.

    Attributes:
        name: the name used in recipes.
        planes: the tensors it needs; the first has the number's shape.
        stochastic: whether ``split`` needs 16 random bits per element.
        decode: ``decode(planes) -> fp32 tensor``.
        split: ``split(x, r)``: the planes of fp32 ``x``; ``r`` is an int32 tensor of uniform 16-bit
            integers if ``stochastic``, else None.
        fallback: the format for tensors whose rows are not whole blocks.
    """

    name: str
    planes: tuple[Plane, ...]
    stochastic: bool
    decode: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor, Any], tuple[Tensor, ...]]
    fallback: Format | None = None

    def encode(self, x: Tensor, r: Tensor | None, planes: Sequence[Tensor]) -> None:
        """Write fp32 ``x`` into ``planes``, in place; ``r`` as for ``split``."""
        for plane, part in zip(planes, self.split(x, r), strict=True):
            plane.copy_(part)

    @cached_property
    def block(self) -> int:
        """How many numbers are encoded together."""
        return max(plane.block for plane in self.planes)

    @property
    def remainders(self) -> tuple[str, ...]:
        """Suffixes of the planes that have no meaning except beside the weight they came with."""
        return tuple(p.suffix for p in self.planes[1:] if not p.dtype.is_floating_point)

    @property
    def bytes_per_element(self) -> float:
        """Bytes that one number takes; an int if that is whole."""
        size = sum(plane.dtype.itemsize / plane.block for plane in self.planes)
        return int(size) if size == int(size) else size

    def fitting(self, shape: Sequence[int]) -> Format:
        """This format, or its fallback if it does not fit a whole tensor of that shape.

        A block lies within a row, that is, within all dimensions but the first, so that no way of
        cutting a tensor in dimension 0 splits a block.
        """
        whole = len(shape) > 1 and prod(shape[1:]) % self.block == 0
        return self if self.fallback is None or whole else self.fallback

    def plane_names(self, name: str) -> tuple[str, ...]:
        """The keys of ``optimizer.state[p]`` for a number; the name of weights is ``""``."""
        return tuple(
            name if not plane.suffix else f"{name}_{plane.suffix}" if name else plane.suffix
            for plane in self.planes
        )
