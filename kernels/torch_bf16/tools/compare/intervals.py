"""Paired differences: their mean and its 95 % interval, of numbers and of whole curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Interval", "band_of", "smooth", "student_t"]


@dataclass(frozen=True)
class Interval:
    """A mean of paired differences and its 95 % confidence interval (Student's t)."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> Interval:
        """The interval of one difference for each pair; infinite for a single pair."""
        mean, n = statistics.fmean(differences), len(differences)
        if n < 2:
            return cls(mean, -math.inf, math.inf)
        half = student_t(n - 1) * statistics.stdev(differences) / math.sqrt(n)
        return cls(mean, mean - half, mean + half)

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def band_of(differences: Sequence[Sequence[float] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The mean of curves of one length, one for each pair, and half its interval's width.

    Both are fp64 of shape (steps,); the width for a single pair is infinite.
    """
    curves = np.asarray(differences, dtype=np.float64)
    pairs = len(curves)
    if pairs < 2:
        return curves[0], np.full(curves.shape[1], np.inf)
    deviation = curves.std(axis=0, ddof=1)
    return curves.mean(axis=0), student_t(pairs - 1) * deviation / math.sqrt(pairs)


def smooth(values: Sequence[float] | np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and of up to ``window - 1`` before it."""
    sums = np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))
    stops = np.arange(1, len(sums))
    starts = np.maximum(stops - window, 0)
    return (sums[stops] - sums[starts]) / (stops - starts)


def student_t(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t.

    For three and more degrees of freedom it is computed by its expansion in the normal quantile
    (Abramowitz & Stegun, 26.7.5), which is right to 0.2 % there.
    """
    if degrees < 3:
        return {1: 12.706, 2: 4.303}[degrees]
    z, n = statistics.NormalDist().inv_cdf(0.975), degrees
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    g4 = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + g1 / n + g2 / n**2 + g3 / n**3 + g4 / n**4
