"""Tells averages that are rounded stochastically, and lose nothing, from those rounded to nearest.

Both change few bf16 numbers per write. Rounded to nearest, only the numbers farthest from what they
follow change; where a program scales the average and adds to it in two roundings, which ones change
depends on their mantissas as well. Rounded stochastically, a number changes with a probability that
is proportional to its distance alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["looks_stochastic"]

# Of simulated writes at decays of 0.99 to 0.9999, stochastic ones had ranks of 0.85 to 0.93 and
# excesses of 0.75 to 1.3; the others higher ranks or, in two roundings, excesses of 3 to 40.
_CHANGED, _RANK, _EXCESS = 12, 0.94, 2.0


def looks_stochastic(before: Tensor, after: Tensor, followed: Tensor) -> bool:
    """Whether a write that moved numbers towards others was rounded stochastically.

    Args:
        before: the bits of bf16 numbers, int16.
        after: the bits that the write left.
        followed: the bits of the numbers that they are blended with.

    Example:
        >>> bits = lambda *x: torch.tensor(x, dtype=torch.bfloat16).view(torch.int16)
        >>> looks_stochastic(bits(1.0, 1.0), bits(1.0, 1.0078125), bits(1.0, 9.0))
        False
    """
    old, new, target = (x.cpu().view(torch.bfloat16).float() for x in (before, after, followed))
    _, exponent = torch.frexp(old)
    spacing = torch.ldexp(torch.ones_like(old), exponent - 8)
    distance = (target - old).abs() / spacing
    moved = (new - old).abs() / spacing
    changed = moved > 0
    count = int(changed.sum())
    if not distance.isfinite().all() or not moved.isfinite().all() or count < _CHANGED:
        return False
    # The chance that a changed number is farther away than one that stayed.
    ranks = distance.argsort().argsort()[changed].double().mean()
    rank = (ranks - (count - 1) / 2) / max(1, len(old) - count)
    chance = (distance * (moved.sum() / distance.sum())).clamp(max=1)
    mantissa = before.cpu().int() & 127
    surplus, variance = torch.zeros(2, 128, device="cpu")
    surplus.index_add_(0, mantissa, changed.float() - chance)
    variance.index_add_(0, mantissa, chance * (1 - chance))
    excess = surplus.square().sum() / variance.sum().clamp(min=1e-9)
    return bool(rank < _RANK and excess < _EXCESS)
