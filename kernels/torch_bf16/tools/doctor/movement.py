"""How far the elements of a weight moved between two checkpoints, by their size.

In a run that loses no updates, how far an element moves does not depend on its size: small and
large elements of a matrix move equally far on average, in whatever format they are saved. Rounding
to nearest lets an element move only if an update is at least half a bf16 spacing, which grows with
the element, so large elements stand still. Elements are grouped by powers of two, between which
bf16 has a single spacing.
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
# Elements of one size that a mean needs, and sizes, from the smallest on, that are pooled.
_ENOUGH, _SIZES = 64, 4


@dataclass
class Movement:
    """How far the elements of one weight moved; "now" is the later checkpoint.

    Attributes:
        numel: how many elements it has, at least one.
        moved: elements whose number changed.
        distance: sum of the distances that elements moved.
        below: elements that moved, but by less than half a bf16 spacing.
        ones: elements that are exactly 1.0 now.
        ones_before: elements that were exactly 1.0 before.
        nan: NaNs now.
        infinite: infinities now.
        rounded: whether all its numbers now are bf16 numbers.
        half_spacings: sum over all elements of half a bf16 spacing at their number now.
        counts: elements by their exponent before.
        distances: sums of the distances that elements moved, by their exponent before.
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
        """Share of the elements whose number did not change."""
        return 1 - self.moved / self.numel

    @property
    def half_spacing(self) -> float:
        """Half a bf16 spacing, on average over the elements."""
        return self.half_spacings / self.numel

    @property
    def reference(self) -> float | None:
        """Mean distance of the elements that are small enough for every update to count.

        None if there are none: the weight has too few elements, or all are of one size.
        """
        means = self.distances / self.counts.clamp(min=1)
        # They moved by several half spacings, so rounding has hardly changed their distance.
        resolved = (self.counts >= _ENOUGH) & (means > 4 * _HALF)
        if not resolved.any():
            return None
        smallest = resolved.nonzero().flatten()[:_SIZES]
        return float(self.distances[smallest].sum() / self.counts[smallest].sum())

    @property
    def finest(self) -> float:
        """Half a bf16 spacing at the smallest element before."""
        return float(_HALF[int(self.counts.nonzero()[0])])

    @property
    def survived(self) -> float | None:
        """How far all elements moved, as a share of how far the small ones among them moved."""
        reference = self.reference
        if reference is None:
            return None
        # Every update moves a zero: those that stand, as pruned weights do, are not rounded.
        first = 1 if self.counts[1:].any() else 0
        counts, distances = self.counts[first:], self.distances[first:]
        went = torch.minimum(distances, counts * reference).sum()
        return float(went / (counts.sum() * reference))

    @property
    def standing(self) -> float | None:
        """The size from which on elements stand still; None if none do."""
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


def movement(before: Read | None, after: Read, numel: int, coarse: bool = False) -> Movement:
    """Compare a weight with its earlier numbers, a piece at a time.

    Args:
        before: reads the elements of the earlier checkpoint; None if there is only one checkpoint.
        after: reads the elements of the later checkpoint.
        numel: how many elements there are.
        coarse: whether ``before`` was rounded to bf16, and ``after`` was not. What it would be
            rounded to the same number has not moved as far as can be seen.
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
        if coarse:
            step.masked_fill_(y.bfloat16().float() == x, 0.0)
        if not bool(step.amax().isfinite()):
            step.nan_to_num_(0.0, 0.0, 0.0)
        moved = int(step.count_nonzero())
        found.moved += moved
        found.below += int((step < half_spacings(x)).count_nonzero()) - (stop - start - moved)
        by_size = torch.from_numpy(np.bincount(exponents, step.numpy(), minlength=_EXPONENTS))
        found.distances += by_size
        found.distance += float(by_size.sum())
    return found


def half_spacings(x: Tensor, step: Tensor | None = None) -> Tensor:
    """Half a bf16 spacing at each number; fp32, never 0.

    Args:
        x: the numbers.
        step: which way they move; away from zero if None. Toward zero, the spacing at a power of
            two is the smaller one of the numbers below it.
    """
    exponents = x.view(torch.int32) & 0x7F800000
    if step is not None:
        inward = ((x.view(torch.int32) & 0x7FFFFF) == 0) & (x * step < 0)
        exponents -= inward.int() << 23
    return exponents.sub_((_MANTISSA + 1) << 23).clamp_(min=1).view(torch.float32)


_HALF = torch.tensor(
    [math.ldexp(1.0, max(e, 1) - _BIAS - _MANTISSA - 1) for e in range(_EXPONENTS)],
    dtype=torch.float32,
)
