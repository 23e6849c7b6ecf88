"""The formats of whole blocks in Numba's dialect: codes are decoded and encoded a tile at a time.

A scale is known when a whole block is. So numbers are put aside in ``room``, memory on the stack,
and encoded when a tile of them is there. From ``at`` on, in floats, ``room`` has the numbers of
even index and half a tile behind them the others; a tile behind, their roots, which a rule may have
taken anyway; two tiles behind, for each pair of neighbours what its codes are multiplied by; and at
``NOISE``, where the format is stochastic, what ``threshold`` made of their noise.

``spread(planes, first, count, room, at)`` puts the scales of ``count`` numbers from element
``first`` on beside their pairs; ``decode(byte, scale)`` gives a number of a byte in the uppermost
quarter of a uint32; ``encode``, with the arguments of ``spread``, writes scales and codes.
"""

from __future__ import annotations

import numpy as np

from torch_bf16.formats import BLOCK

from .bits import (
    TILE,
    add32,
    and32,
    float_from_bits,
    float_to_bits,
    max32,
    or32,
    part,
    shl32,
    shr32,
    wide_vectors,
    xor32,
)
from .planes import store_bytes
from .vectors import HALF_BLOCK, fill, largest_magnitude

__all__ = ["BLOCK_CODECS", "NOISE", "ODD", "PER_SCALE", "ROOTS", "SCALES", "spread", "threshold"]

_u32, _f32, _uint = np.uint32, np.float32, np.uintp
ODD, ROOTS, SCALES = TILE // 2, TILE, 2 * TILE
NOISE = SCALES + TILE // 2
PER_SCALE = NOISE + TILE
_SIGN, _INFINITY = _u32(0x80000000), _u32(0x7F800000)
_QUIET, _SMALLEST_SCALE, _S7, _S24 = _u32(0x00400000), _u32(0x0D800000), _u32(7), _u32(24)
# 2**23 and 1.5 * 2**23: beside them, the last bits of a float count ones.
_ONES, _SIGNED_ONES = _f32(8388608.0), _f32(12582912.0)
_TOP_INT8, _TOP_UINT8 = _f32(127.0**2), _f32(255.0**2)
_UNIT_INT8, _UNIT_UINT8 = _f32(1 / 127.0**2), _f32(1 / 255.0**2)


@part
def spread(planes, first, count, room, at):
    for block in range(count // BLOCK):
        fill(room, _uint(at + SCALES + block * HALF_BLOCK), planes[1][first // BLOCK + block])


@part(error_model="numpy")
def _new_scales(scales, first, count, room, at, top, stochastic):
    """Store the scales, and beside each pair ``top`` divided by its own, and the root of that."""
    for block in range(count // BLOCK):
        i = _uint(at + block * HALF_BLOCK)
        # As integers, NaN is above infinity and that above all numbers.
        largest = largest_magnitude(room, i, i + _uint(ODD))
        bits = max32(largest, _SMALLEST_SCALE) if largest > _u32(0) else largest
        bits = or32(bits, _QUIET) if bits >= _INFINITY else bits
        scale = float_from_bits(bits)
        scales[first // BLOCK + block] = scale
        per_scale = top / scale
        fill(room, i + _uint(SCALES), np.sqrt(per_scale))
        if stochastic:
            fill(room, i + _uint(PER_SCALE), per_scale)


@part
def decode_int8(byte, scale):
    code = float_from_bits(xor32(shr32(byte, _S24), _u32(0x4B000080))) - _f32(8388736.0)
    return code * abs(code) * _UNIT_INT8 * scale


@part
def _encode_int8(room, at, per_root):
    root = room[at + _uint(ROOTS)] * per_root
    # A NaN, which no integer is, becomes 0.
    root = root if root > _f32(0.0) else _f32(0.0)
    signed = or32(float_to_bits(root), and32(float_to_bits(room[at]), _SIGN))
    return shl32(float_to_bits(float_from_bits(signed) + _SIGNED_ONES), _S24)


@part(error_model="numpy")
def encode_int8(planes, first, count, room, at):
    wide_vectors()
    codes, scales = planes
    _new_scales(scales, first, count, room, at, _TOP_INT8, False)
    for j in range(count // 2):
        i = _uint(j)
        here = _uint(at) + i
        per_root = room[here + _uint(SCALES)]
        even = _encode_int8(room, here, per_root)
        odd = _encode_int8(room, here + _uint(ODD), per_root)
        store_bytes(codes, _uint(first) + i + i, even, odd)


@part
def threshold(r):
    """Of the odd multiples of 2**-15 below 2, the one that 16 random bits stand for."""
    # Bit 23 and a shift of 7 make the exponent of 2.
    draw = or32(and32(r, _u32(0xFFFC)), _u32(0x00800002))
    return float_from_bits(shl32(draw, _S7)) - _f32(2.0)


@part
def decode_uint8(byte, scale):
    code = float_from_bits(or32(shr32(byte, _S24), _u32(0x4B000000))) - _ONES
    return code * code * _UNIT_UINT8 * scale


@part
def _encode_uint8(room, at, noise, per_scale, per_root):
    x = room[at]
    root = room[at + _uint(ROOTS)] * per_root
    root = root if root > _f32(1.25) else _f32(1.25)
    # Down to a whole number, but to the one below where a tie goes there; then it goes up.
    bits = float_to_bits(root + _f32(8388607.5))
    code = float_from_bits(bits) - _ONES
    up = x * per_scale - code * code > noise * (code + _f32(0.5))
    byte = add32(bits, _u32(1)) if up else bits
    return shl32(byte if x > _f32(0.0) else _u32(0), _S24)


@part(error_model="numpy")
def encode_uint8(planes, first, count, room, at):
    wide_vectors()
    codes, scales = planes
    _new_scales(scales, first, count, room, at, _TOP_UINT8, True)
    for j in range(count // 2):
        i = _uint(j)
        here = _uint(at) + i
        per_root, per_scale = room[here + _uint(SCALES)], room[here + _uint(PER_SCALE)]
        noise = here + _uint(NOISE)
        even = _encode_uint8(room, here, room[noise], per_scale, per_root)
        odd = _encode_uint8(room, here + _uint(ODD), room[noise + _uint(ODD)], per_scale, per_root)
        store_bytes(codes, _uint(first) + i + i, even, odd)


BLOCK_CODECS = {"int8": (decode_int8, encode_int8), "uint8": (decode_uint8, encode_uint8)}
