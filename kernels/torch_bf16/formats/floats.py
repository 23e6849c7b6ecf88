"""Formats of floats: fp32, bf16, and bf16 with the remainder of a master, or a master, beside it.

``bf16+16`` and ``bf16+fp32`` hold any fp32 number. ``bf16+8`` holds floats of 24 bits, to
which it rounds stochastically: weights in it neither stall nor drift, however small the updates.
"""

from __future__ import annotations

import torch

from torch_bf16.numerics.rounding import (
    bf16_nearest,
    bf16_stochastic,
    join8,
    join16,
    split8,
    split16,
)

from .format import Format, Plane

__all__ = [
    "BF16_NEAREST",
    "BF16_PLUS_8",
    "BF16_PLUS_16",
    "BF16_PLUS_FP32",
    "BF16_STOCHASTIC",
    "FP32",
]


def _decode(planes):
    return planes[0].float()


def _decode_bf16_plus_fp32(planes):
    weight, master = planes
    # A weight that differs from the rounded master was written by something else, and counts.
    written = bf16_nearest(master).view(torch.int16) != weight.view(torch.int16)
    return torch.where(written, weight.float(), master)


_FP32, _BF16 = Plane("", torch.float32), Plane("", torch.bfloat16)

FP32 = Format("fp32", (_FP32,), False, _decode, lambda x, r: (x,))
BF16_NEAREST = Format("bf16_nearest", (_BF16,), False, _decode, lambda x, r: (bf16_nearest(x),))
BF16_STOCHASTIC = Format(
    "bf16_stochastic", (_BF16,), True, _decode, lambda x, r: (bf16_stochastic(x, r),)
)
BF16_PLUS_16 = Format(
    "bf16+16",
    (_BF16, Plane("remainder16", torch.int16)),
    False,
    lambda planes: join16(*planes),
    lambda x, r: split16(x),
)
BF16_PLUS_8 = Format(
    "bf16+8",
    (_BF16, Plane("remainder8", torch.int8)),
    True,
    lambda planes: join8(*planes),
    lambda x, r: split8(x, r >> 8),
)
BF16_PLUS_FP32 = Format(
    "bf16+fp32",
    (_BF16, Plane("master", torch.float32)),
    False,
    _decode_bf16_plus_fp32,
    lambda x, r: (bf16_nearest(x), x),
)
