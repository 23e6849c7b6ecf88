"""What a storage format is: how one number is kept between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    """

    suffix: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Format:
    """A storage format in its eager dialect; other backends have their own, with the same bits.

    Attributes:
        name: the name used in recipes.
        planes: the tensors it needs, all of the number's shape; the first can be computed with.
        stochastic: whether ``encode`` needs 16 random bits per element.
        decode: ``decode(planes) -> fp32 tensor``.
        encode: ``encode(x, r, planes)`` writes fp32 ``x`` into ``planes`` in place; ``r`` is an
            int32 tensor of uniform 16-bit integers where ``stochastic``, else None.
    """

    name: str
    planes: tuple[Plane, ...]
    stochastic: bool
    decode: Callable[[Sequence[Tensor]], Tensor]
    encode: Callable[[Tensor, Tensor | None, Sequence[Tensor]], None]

    @property
    def bytes_per_element(self) -> int:
        """Bytes that one number takes."""
        return sum(plane.dtype.itemsize for plane in self.planes)

    def plane_names(self, name: str) -> tuple[str, ...]:
        """The keys of ``optimizer.state[p]`` for a number; the name of weights is ``""``."""
        return tuple(
            name if not plane.suffix else f"{name}_{plane.suffix}" if name else plane.suffix
            for plane in self.planes
        )
