"""How the learning rate changes over a run."""

from __future__ import annotations

import math

__all__ = ["learning_rate_factor"]


def learning_rate_factor(step: int, steps: int) -> float:
    """A short linear warm-up, then half a cosine down to 1 % of the peak; for ``LambdaLR``."""
    warm_up = min(1.0, 20 * (step + 1) / steps)
    return warm_up * (0.01 + 0.99 * (1 + math.cos(math.pi * step / steps)) / 2)
