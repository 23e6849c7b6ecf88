"""How far the elements of a weight went between two checkpoints, by their size.

Of what training does to weights, their size says nothing: in a run that loses no updates, small and
large elements of a matrix go equally far on average, whatever of them is saved. Rounding to nearest
lets an element move only where an update is at least half a bf16 spacing, which grows with it:
there the large ones stand still. Sizes are told apart by powers of two, within which bf16 has one
spacing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .exact import CHUNK, Read

__all__ = ["Movement", "half_spacings", "movement"]

_EXPONENTS = 256
_BIAS, _MANTISSA = 127, 7
# Elements of one size for a mean, and sizes, from the smallest on, that are taken together.
_ENOUGH, _SIZES = 64, 4


@dataclass
class Movement:
    """What became of one weight.

    Attributes:
        numel: its elements.
        moved: those that are another number now.
        distance: sum of how far they went.
        below: those that went less than half a bf16 spacing.
        ones: those that are exactly 1.0 now.
        ones_before: those that were.
        nan: NaNs now.
        infinite: infinities now.
        rounded: whether all its numbers are numbers of bf16.
        half_spacings: sum of half a bf16 spacing at each number now.
        counts: elements by the exponent that they had.
        distances: how far those of each exponent went, together.
    """

    numel: int
    moved: int = 0
    distance: float = 0.0
    below: int = 0
    ones: int = 0
    ones_before: int = 0
    nan: int = 0
    infinite: int = 0
    rounded: bool = True
    half_spacings: float = 0.0
    counts: Tensor = field(default_factory=lambda: torch.zeros(_EXPONENTS, dtype=torch.float64))
    distances: Tensor = field(default_factory=lambda: torch.zeros(_EXPONENTS, dtype=torch.float64))

    @property
    def unmoved(self) -> float:
        """Share of the elements that are what they were."""
        return 1 - self.moved / self.numel if self.numel else 0.0

    @property
    def half_spacing(self) -> float:
        """Half a bf16 spacing, on average over the elements."""
        return self.half_spacings / self.numel if self.numel else 0.0

    @property
    def reference(self) -> float | None:
        """How far elements go on average that are small enough for every update to count.

        None where none are: too few elements, or all of one size.
        """
        means = self.distances / self.counts.clamp(min=1)
        # They went by many units, so that rounding has left their distance as it was.
        resolved = (self.counts >= _ENOUGH) & (means > 4 * _HALF)
        if not resolved.any():
            return None
        smallest = resolved.nonzero().flatten()[:_SIZES]
        return float(self.distances[smallest].sum() / self.counts[smallest].sum())

    @property
    def finest(self) -> float:
        """Half a bf16 spacing of the smallest element that there was."""
        return float(_HALF[int(self.counts.nonzero()[0])])

    @property
    def survived(self) -> float | None:
        """Which share of the way the elements went that the small ones among them went."""
        reference = self.reference
        if reference is None or not self.numel:
            return None
        went = torch.minimum(self.distances, self.counts * reference).sum()
        return float(went / (self.counts.sum().clamp(min=1) * reference))

    @property
    def standing(self) -> float | None:
        """The size from which on elements stand still, None where none do."""
        reference = self.reference
        if reference is None:
            return None
        exponents = self.counts.nonzero().flatten().tolist()
        size = None
        for each in reversed(exponents):
            if self.distances[each] >= 0.1 * reference * self.counts[each]:
                break
            size = 2.0 ** (each - _BIAS)
        return size


def movement(before: Read | None, after: Read, numel: int) -> Movement:
    """Compare a weight with what it was, a piece at a time.

    Args:
        before: reads its elements as fp32; None where there is one checkpoint alone.
        after: reads those of the later checkpoint.
        numel: how many there are.
    """
    found = Movement(numel)
    for start in range(0, numel, CHUNK):
        stop = min(start + CHUNK, numel)
        y = after(start, stop)
        x = y if before is None else before(start, stop)
        found.ones += int((y == 1).count_nonzero())
        finite = bool(y.abs().amax().isfinite())
        if not finite:
            found.nan += int(y.isnan().count_nonzero())
            found.infinite += int(y.isinf().count_nonzero())
        if found.rounded:
            found.rounded = not bool((y.view(torch.int32) & 0xFFFF).any())
        found.half_spacings += float(half_spacings(y).nan_to_num_(0.0, 0.0, 0.0).sum())
        exponents = ((x.view(torch.int32) >> 23) & (_EXPONENTS - 1)).numpy()
        found.counts += torch.from_numpy(np.bincount(exponents, minlength=_EXPONENTS))
        if before is None:
            continue
        found.ones_before += int((x == 1).count_nonzero())
        step = (y - x).abs_()
        if not bool(step.amax().isfinite()):
            step.nan_to_num_(0.0, 0.0, 0.0)
        moved = int(step.count_nonzero())
        found.moved += moved
        found.below += int((step < half_spacings(x)).count_nonzero()) - (stop - start - moved)
        by_size = torch.from_numpy(np.bincount(exponents, step.numpy(), minlength=_EXPONENTS))
        found.distances += by_size
        found.distance += float(by_size.sum())
    return found


def half_spacings(x: Tensor) -> Tensor:
    """Half a bf16 spacing at each number; fp32, never 0."""
    exponents = x.view(torch.int32) & 0x7F800000
    return exponents.sub_((_MANTISSA + 1) << 23).clamp_(min=1).view(torch.float32)


_HALF = torch.tensor(
    [math.ldexp(1.0, max(e, 1) - _BIAS - _MANTISSA - 1) for e in range(_EXPONENTS)],
    dtype=torch.float32,
)
