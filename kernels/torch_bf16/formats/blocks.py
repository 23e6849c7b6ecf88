"""Formats of one byte and a scale: blocks of 64 numbers share the fp32 magnitude of their largest.

Blocks lie over the row-major index of the whole tensor, never over a shard's. With ``s`` the scale:

- ``int8``, for first moments: code ``q`` in -127 .. 127 stands for ``q * |q| / 127**2 * s``, and a
  number gets the code nearest to its signed root. The root spends codes where the numbers are: the
  smallest number that is distinguished from zero is 1.5e-5 of the largest in its block.
- ``uint8``, its counterpart for second moments: code ``q`` stands for ``(q / 255)**2 * s``, so that
  codes are linear in the root that an update divides by. A number between the values of ``q`` and
  ``q + 1`` gets one of them with the probabilities that make its mean exact, in steps of 2**-14,
  because an average that is rounded to nearest stops following when gradients shrink. Code 0 is for
  0 alone: anything larger gets code 1 at least, so that no update is divided by eps alone.

Numbers decoded from a block encode to the same bits again, whatever the draws. A block of zeros has
scale 0. Any other scale is at least 2**-100, so that its reciprocal is finite; smaller numbers use
few of the codes. A block with a NaN or an infinity decodes to NaN throughout, because its scale is
NaN: the fault cannot be overlooked, and no other block is affected. A negative number has no place
among second moments, and is stored as 0.
"""

from __future__ import annotations

import torch

from torch_bf16.numerics.roots import sqrt
from torch_bf16.numerics.rounding import INFINITY, MAGNITUDE, QUIET

from .floats import BF16_NEAREST, BF16_STOCHASTIC
from .format import Format, Plane

__all__ = ["BLOCK", "INT8", "UINT8"]

BLOCK = 64

_SMALLEST_SCALE = 0x0D800000  # 2**-100


def _scales(x):
    """The scale of each block: fp32, ``x`` flat."""
    bits = x.view(torch.int32) & MAGNITUDE
    # As integers, NaN is above infinity, and infinity above all numbers.
    largest = bits.view(-1, BLOCK).amax(1) if len(x) else bits
    scale = torch.where(largest == 0, 0, largest.clamp(min=_SMALLEST_SCALE))
    return torch.where(scale >= INFINITY, scale | QUIET, scale).view(torch.float32)


def _per_scale(scales, top):
    """The factor that turns the largest number of a block into ``top``; NaN if the scale is NaN.

    The dividend is a tensor: for a Python number torch would multiply by the reciprocal.
    """
    return torch.full_like(scales, top) / scales


def _times(x, of_blocks):
    return (x.view(-1, BLOCK) * of_blocks[:, None]).view(-1)


def _decode(square, scales, top):
    return _times(square * (1.0 / top), scales.view(-1)).view(square.shape)


def _decode_int8(planes):
    code = planes[0].float()
    return _decode(code * code.abs(), planes[1], 127.0**2)


def _split_int8(x, r):
    flat = x.contiguous().view(-1)
    scales = _scales(flat)
    root = _times(sqrt(flat.abs()), sqrt(_per_scale(scales, 127.0**2)))
    # NaN has no code: it becomes 0.
    code = torch.where(root > 0, root, 0).round()
    return _shaped(torch.where(flat < 0, -code, code), scales, x)


def _decode_uint8(planes):
    code = planes[0].float()
    return _decode(code * code, planes[1], 255.0**2)


def _split_uint8(x, r):
    flat = x.contiguous().view(-1)
    scales = _scales(flat)
    per_scale = _per_scale(scales, 255.0**2)
    # Two roots and a product, so that a rule that takes the root of its second moment shares it.
    root = _times(sqrt(flat), sqrt(per_scale))
    # Rounds down; a whole number may become the one below, and then the draw always adds one.
    code = (torch.where(root > 1.25, root, 1.25) + 8388607.5) - 8388608.0
    # An odd multiple of 2**-14 below 2: a number that is a code, or a hair off it, gets that code.
    threshold = ((r.view(-1) & 0xFFFC) | 2).float() * 2.0**-15
    up = _times(flat, per_scale) - code * code > threshold * (code + 0.5)
    return _shaped(torch.where(flat > 0, code + up, 0), scales, x)


def _shaped(codes, scales, x):
    return codes.view(x.shape), scales.view(_SCALE.shape(x.shape)) if x.ndim > 1 else scales


_INT8, _UINT8 = Plane("", torch.int8), Plane("", torch.uint8)
_SCALE = Plane("scale", torch.float32, BLOCK)

INT8 = Format("int8", (_INT8, _SCALE), False, _decode_int8, _split_int8, BF16_NEAREST)
UINT8 = Format("uint8", (_UINT8, _SCALE), True, _decode_uint8, _split_uint8, BF16_STOCHASTIC)
