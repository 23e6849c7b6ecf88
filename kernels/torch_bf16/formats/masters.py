"""Formats of two planes: a bf16 number to compute with, and the rest of a master beside it.

``remainder16`` and ``master32`` hold any fp32 number. ``remainder8`` holds floats of 24 bits, to
which it rounds stochastically: weights in it neither stall nor drift, however small the updates.
"""

from __future__ import annotations

import torch

from torch_bf16.rounding import bf16_nearest, join8, join16, split8, split16

from .format import Format, Plane

__all__ = ["MASTER32", "REMAINDER8", "REMAINDER16"]


def _decode_remainder16(planes):
    return join16(*planes)


def _encode_remainder16(x, r, planes):
    for plane, half in zip(planes, split16(x), strict=True):
        plane.copy_(half)


def _decode_remainder8(planes):
    return join8(*planes)


def _encode_remainder8(x, r, planes):
    for plane, part in zip(planes, split8(x, r >> 8), strict=True):
        plane.copy_(part)


def _decode_master32(planes):
    weight, master = planes
    # A weight written from outside no longer is the rounded master: then the weight counts.
    written = bf16_nearest(master).view(torch.int16) != weight.view(torch.int16)
    return torch.where(written, weight.float(), master)


def _encode_master32(x, r, planes):
    planes[0].copy_(bf16_nearest(x))
    planes[1].copy_(x)


REMAINDER16 = Format(
    "remainder16",
    (Plane("", torch.bfloat16), Plane("remainder16", torch.int16)),
    False,
    _decode_remainder16,
    _encode_remainder16,
)
REMAINDER8 = Format(
    "remainder8",
    (Plane("", torch.bfloat16), Plane("remainder8", torch.int8)),
    True,
    _decode_remainder8,
    _encode_remainder8,
)
MASTER32 = Format(
    "master32",
    (Plane("", torch.bfloat16), Plane("master", torch.float32)),
    False,
    _decode_master32,
    _encode_master32,
)
