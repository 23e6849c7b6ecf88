"""The formats in blocks in Numba's dialect: a tile of blocks is encoded together.

A block's scale depends on all of its numbers. So the results of a tile are kept in ``scratch``,
floats on the stack, and encoded when the tile is complete. Each number of the rule that is stored
in blocks has a section there, which begins at its offset:

- at 0 the numbers of even index, and at ``ODD`` the others;
- at ``ROOTS`` their square roots, which the rule may have taken anyway;
- at ``SCALES``, for each pair of neighbours, their block's scale, later the factor of their roots;
- for stochastic formats also at ``PER_SCALE`` the factor of the numbers themselves, and at
  ``NOISE`` their noise as ``threshold`` returns it.

``decode(byte, scale)`` takes a byte in the top byte of a uint32; ``encode(scratch, place, pair)``
returns one, for the number at ``place``, where ``pair`` is the place of the first of its pair.
"""

from __future__ import annotations

import numpy as np

from torch_bf16.formats import BLOCK

from .bits import (
    add32,
    and32,
    float_from_bits,
    float_to_bits,
    inlined,
    max32,
    or32,
    shl32,
    shr32,
    xor32,
)
from .llvm_hints import TILE
from .simd import HALF_BLOCK, fill, largest_magnitude

__all__ = [
    "BLOCK_CODECS",
    "NOISE",
    "ODD",
    "ROOTS",
    "SCALES",
    "new_scales",
    "size_in_scratch",
    "spread",
    "threshold",
]

_u32, _f32, _uint = np.uint32, np.float32, np.uintp
ODD, ROOTS, SCALES, PER_SCALE, NOISE = TILE // 2, TILE, 2 * TILE, TILE * 5 // 2, 3 * TILE
_SIGN, _INFINITY = _u32(0x80000000), _u32(0x7F800000)
_QUIET, _SMALLEST_SCALE, _S7, _S24 = _u32(0x00400000), _u32(0x0D800000), _u32(7), _u32(24)
# 2**23 and 1.5 * 2**23: adding one of them to a float rounds it to an integer, in the lowest bits.
_ONES, _SIGNED_ONES = _f32(8388608.0), _f32(12582912.0)
_TOP_INT8, _TOP_UINT8 = _f32(127.0**2), _f32(255.0**2)
_UNIT_INT8, _UNIT_UINT8 = _f32(1 / 127.0**2), _f32(1 / 255.0**2)


def size_in_scratch(format_):
    """The number of floats in the section of a number of that format."""
    return 0 if format_.block == 1 else 4 * TILE if format_.stochastic else TILE * 5 // 2


@inlined
def spread(planes, first, count, scratch, at):
    """Copy the scales of ``count`` numbers from element ``first`` on, one for each pair."""
    for block in range(count // BLOCK):
        fill(scratch, _uint(at + SCALES + block * HALF_BLOCK), planes[1][first // BLOCK + block])


@inlined
def new_scales(planes, first, count, scratch, at, top, stochastic):
    """Store new scales, and in scratch the factors computed from them."""
    for block in range(count // BLOCK):
        i = _uint(at + block * HALF_BLOCK)
        # As integers, NaN is above infinity and infinity above all numbers.
        largest = largest_magnitude(scratch, i, i + _uint(ODD))
        bits = max32(largest, _SMALLEST_SCALE) if largest > _u32(0) else largest
        bits = or32(bits, _QUIET) if bits >= _INFINITY else bits
        scale = float_from_bits(bits)
        planes[1][first // BLOCK + block] = scale
        per_scale = top / scale
        fill(scratch, i + _uint(SCALES), np.sqrt(per_scale))
        if stochastic:
            fill(scratch, i + _uint(PER_SCALE), per_scale)


@inlined
def decode_int8(byte, scale):
    code = float_from_bits(xor32(shr32(byte, _S24), _u32(0x4B000080))) - _f32(8388736.0)
    return code * abs(code) * _UNIT_INT8 * scale


@inlined
def encode_int8(scratch, place, pair):
    root = scratch[place + _uint(ROOTS)] * scratch[pair + _uint(SCALES)]
    # NaN has no code: it becomes 0.
    root = root if root > _f32(0.0) else _f32(0.0)
    signed = or32(float_to_bits(root), and32(float_to_bits(scratch[place]), _SIGN))
    return shl32(float_to_bits(float_from_bits(signed) + _SIGNED_ONES), _S24)


@inlined
def threshold(r):
    """One of the odd multiples of 2**-14 below 2, chosen by 16 random bits."""
    # Bit 23, shifted by 7, is the exponent of 2.
    draw = or32(and32(r, _u32(0xFFFC)), _u32(0x00800002))
    return float_from_bits(shl32(draw, _S7)) - _f32(2.0)


@inlined
def decode_uint8(byte, scale):
    code = float_from_bits(or32(shr32(byte, _S24), _u32(0x4B000000))) - _ONES
    return code * code * _UNIT_UINT8 * scale


@inlined
def encode_uint8(scratch, place, pair):
    x = scratch[place]
    root = scratch[place + _uint(ROOTS)] * scratch[pair + _uint(SCALES)]
    root = root if root > _f32(1.25) else _f32(1.25)
    # Rounds down; an integer is a tie, and may become the one below. The draw may add one.
    bits = float_to_bits(root + _f32(8388607.5))
    code = float_from_bits(bits) - _ONES
    limit = scratch[place + _uint(NOISE)] * (code + _f32(0.5))
    up = x * scratch[pair + _uint(PER_SCALE)] - code * code > limit
    byte = add32(bits, _u32(1)) if up else bits
    return shl32(byte if x > _f32(0.0) else _u32(0), _S24)


BLOCK_CODECS = {
    "int8": (decode_int8, encode_int8, _TOP_INT8),
    "uint8": (decode_uint8, encode_uint8, _TOP_UINT8),
}
"""``(decode, encode, top)``, where ``top`` is the square of the largest code."""
