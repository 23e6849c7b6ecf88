"""Whether a backend's sums of squares are right: on numbers for which every order gives the same.

Small whole numbers times a power of two, whose squares fp32 adds up exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from torch_bf16.backends.backend import Backend

__all__ = ["wrong_sum"]

# The last is cut into pieces by every backend.
_SIZES = (1, 3, 0, 130, 4097, 2**17 + 77)
# In fp32, squares of the second overflow; the third are subnormal, and their squares zero.
_EXPONENTS = (0, 110, -130)


def wrong_sum(backend: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    """What a backend adds up wrongly; None where all is right."""
    for beside in (False, True):
        for tensors, expected in _cases(device, dtype, beside):
            found = backend.squares(tensors)
            value = math.nan if found is None else float(found)
            if found is None or not (value == expected or math.isnan(value) & math.isnan(expected)):
                return f"a sum of squares is {found if found is None else value} and not {expected}"
    return None


def _cases(
    device: torch.device, dtype: torch.dtype, beside: bool
) -> Iterator[tuple[list[Tensor], float]]:
    raw = np.random.PCG64(7).random_raw(sum(_SIZES)) % np.uint64(17)
    whole = raw.astype(np.int64) - 8
    for exponent in _EXPONENTS:
        numbers = whole * 2.0**exponent
        expected = math.ldexp(int((whole**2).sum()), 2 * exponent)
        yield _placed(numbers, device, dtype, beside), expected
    for special, expected in ((math.inf, math.inf), (math.nan, math.nan), (0.0, 0.0)):
        numbers = whole * float(bool(special))
        numbers[len(whole) // 2] = special
        yield _placed(numbers, device, dtype, beside), expected


def _placed(
    numbers: np.ndarray, device: torch.device, dtype: torch.dtype, beside: bool
) -> list[Tensor]:
    """Tensors of these numbers; ``beside`` lets them start one element after an aligned address."""
    host = torch.from_numpy(numbers.astype(np.float32)).to(dtype)
    found = []
    for each in host.split(_SIZES):
        room = torch.empty(len(each) + 1, dtype=dtype, device=device)
        found.append((room[1:] if beside else room[:-1]).copy_(each))
    return found
