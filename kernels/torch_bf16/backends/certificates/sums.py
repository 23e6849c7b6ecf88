"""Checks a backend's sums of squares on numbers for which every order gives the same sum.

The numbers are small integers times a power of two, whose squares fp32 adds up exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from torch_bf16.backends.backend import Backend

__all__ = ["wrong_sum"]

# Every backend cuts the last one into pieces.
_SIZES = (1, 3, 0, 130, 4097, 2**17 + 77)
# With the second, squares overflow in fp32; with the third, numbers are subnormal and squares zero.
_EXPONENTS = (0, 110, -130)


def wrong_sum(backend: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    """The first sum that a backend gets wrong; None if all are right."""
    for unaligned in (False, True):
        for tensors, expected in _cases(device, dtype, unaligned):
            found = backend.squares(tensors)
            value = math.nan if found is None else float(found)
            if found is None or not (value == expected or math.isnan(value) & math.isnan(expected)):
                return f"a sum of squares is {found if found is None else value} and not {expected}"
    return None


def _cases(
    device: torch.device, dtype: torch.dtype, unaligned: bool
) -> Iterator[tuple[list[Tensor], float]]:
    raw = np.random.PCG64(7).random_raw(sum(_SIZES)) % np.uint64(17)
    whole = raw.astype(np.int64) - 8
    for exponent in _EXPONENTS:
        numbers = whole * 2.0**exponent
        expected = math.ldexp(int((whole**2).sum()), 2 * exponent)
        yield _placed(numbers, device, dtype, unaligned), expected
    for special, expected in ((math.inf, math.inf), (math.nan, math.nan), (0.0, 0.0)):
        numbers = whole * float(bool(special))
        numbers[len(whole) // 2] = special
        yield _placed(numbers, device, dtype, unaligned), expected


def _placed(
    numbers: np.ndarray, device: torch.device, dtype: torch.dtype, unaligned: bool
) -> list[Tensor]:
    """Tensors of these numbers, which start at an aligned address or one element after it."""
    host = torch.from_numpy(numbers.astype(np.float32)).to(dtype)
    tensors = []
    for part in host.split(_SIZES):
        room = torch.empty(len(part) + 1, dtype=dtype, device=device)
        tensors.append((room[1:] if unaligned else room[:-1]).copy_(part))
    return tensors
