"""Formats of two planes: a bf16 number to compute with, and the rest of a master beside it.

``bf16+16`` and ``bf16+fp32`` hold any fp32 number. ``bf16+8`` holds floats of 24 bits, to
which it rounds stochastically: weights in it neither stall nor drift, however small the updates.
"""

from __future__ import annotations

import torch

from torch_bf16.numerics.rounding import bf16_nearest, join8, join16, split8, split16

from .format import Format, Plane

__all__ = ["BF16_PLUS_8", "BF16_PLUS_16", "BF16_PLUS_FP32"]


def _decode_bf16_plus_16(planes):
    return join16(*planes)


def _encode_bf16_plus_16(x, r, planes):
    for plane, half in zip(planes, split16(x), strict=True):
        plane.copy_(half)


def _decode_bf16_plus_8(planes):
    return join8(*planes)


def _encode_bf16_plus_8(x, r, planes):
    for plane, part in zip(planes, split8(x, r >> 8), strict=True):
        plane.copy_(part)


def _decode_bf16_plus_fp32(planes):
    weight, master = planes
    # A weight written from outside no longer is the rounded master: then the weight counts.
    written = bf16_nearest(master).view(torch.int16) != weight.view(torch.int16)
    return torch.where(written, weight.float(), master)


def _encode_bf16_plus_fp32(x, r, planes):
    planes[0].copy_(bf16_nearest(x))
    planes[1].copy_(x)


BF16_PLUS_16 = Format(
    "bf16+16",
    (Plane("", torch.bfloat16), Plane("remainder16", torch.int16)),
    False,
    _decode_bf16_plus_16,
    _encode_bf16_plus_16,
)
BF16_PLUS_8 = Format(
    "bf16+8",
    (Plane("", torch.bfloat16), Plane("remainder8", torch.int8)),
    True,
    _decode_bf16_plus_8,
    _encode_bf16_plus_8,
)
BF16_PLUS_FP32 = Format(
    "bf16+fp32",
    (Plane("", torch.bfloat16), Plane("master", torch.float32)),
    False,
    _decode_bf16_plus_fp32,
    _encode_bf16_plus_fp32,
)
