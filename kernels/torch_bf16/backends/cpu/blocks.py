"""The formats of whole blocks in Numba's dialect: a tile of blocks is decoded and encoded together.

``decode(planes, first, count, room, at)`` puts the ``count`` numbers from element ``first`` on into
``room``, from ``at`` on. ``encode``, with the same arguments, writes what has taken their places
there; a tile behind them it finds their roots, and another behind, where the format is stochastic,
what ``threshold`` made of their noise. These are short loops over memory on the stack, each of
which becomes vector instructions; a root that a rule takes, too, is taken once.
"""

from __future__ import annotations

import numba
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
    shl32,
    wide_vectors,
    xor32,
)

__all__ = ["BLOCK_CODECS", "threshold"]

_u32, _f32 = np.uint32, np.float32
_SIGN, _MAGNITUDE, _INFINITY = _u32(0x80000000), _u32(0x7FFFFFFF), _u32(0x7F800000)
_QUIET, _SMALLEST_SCALE, _S7 = _u32(0x00400000), _u32(0x0D800000), _u32(7)
# 2**23 and 1.5 * 2**23: beside them, the last bits of a float count ones.
_ONES, _SIGNED_ONES = _f32(8388608.0), _f32(12582912.0)
_TOP_INT8, _TOP_UINT8 = _f32(127.0**2), _f32(255.0**2)
_UNIT_INT8, _UNIT_UINT8 = _f32(1 / 127.0**2), _f32(1 / 255.0**2)


@numba.njit
def _store_scales(scales, first, count, room, at):
    wide_vectors()
    for block in range(count // BLOCK):
        start = np.uintp(at + block * BLOCK)
        largest = _u32(0)
        # As integers, NaN is above infinity and that above all numbers.
        for j in range(BLOCK):
            largest = max32(largest, and32(float_to_bits(room[start + np.uintp(j)]), _MAGNITUDE))
        bits = max32(largest, _SMALLEST_SCALE) if largest > _u32(0) else largest
        bits = or32(bits, _QUIET) if bits >= _INFINITY else bits
        scales[np.uintp(first // BLOCK + block)] = float_from_bits(bits)


@numba.njit
def decode_int8(planes, first, count, room, at):
    wide_vectors()
    codes, scales = planes
    for block in range(count // BLOCK):
        scale = scales[np.uintp(first // BLOCK + block)]
        for j in range(BLOCK):
            i = np.uintp(block * BLOCK + j)
            bits = or32(xor32(_u32(codes[np.uintp(first) + i]), _u32(0x80)), _u32(0x4B000000))
            code = float_from_bits(bits) - _f32(8388736.0)
            room[np.uintp(at) + i] = code * abs(code) * _UNIT_INT8 * scale


@numba.njit(error_model="numpy")
def encode_int8(planes, first, count, room, at):
    wide_vectors()
    codes, scales = planes
    _store_scales(scales, first, count, room, at)
    for block in range(count // BLOCK):
        per_root = np.sqrt(_TOP_INT8 / scales[np.uintp(first // BLOCK + block)])
        for j in range(BLOCK):
            i = np.uintp(block * BLOCK + j)
            x = float_to_bits(room[np.uintp(at) + i])
            root = room[np.uintp(at + TILE) + i] * per_root
            # A NaN, which no integer is, becomes 0.
            root = root if root > _f32(0.0) else _f32(0.0)
            signed = or32(float_to_bits(root), and32(x, _SIGN))
            code = float_to_bits(float_from_bits(signed) + _SIGNED_ONES)
            codes[np.uintp(first) + i] = np.uint8(and32(code, _u32(0xFF)))


@numba.njit
def threshold(r):
    """Of the odd multiples of 2**-15 below 2, the one that 16 random bits stand for."""
    draw = or32(and32(r, _u32(0xFFFC)), _u32(2))
    return float_from_bits(or32(shl32(draw, _S7), _u32(0x40000000))) - _f32(2.0)


@numba.njit
def decode_uint8(planes, first, count, room, at):
    wide_vectors()
    codes, scales = planes
    for block in range(count // BLOCK):
        scale = scales[np.uintp(first // BLOCK + block)]
        for j in range(BLOCK):
            i = np.uintp(block * BLOCK + j)
            bits = or32(_u32(codes[np.uintp(first) + i]), _u32(0x4B000000))
            code = float_from_bits(bits) - _ONES
            room[np.uintp(at) + i] = code * code * _UNIT_UINT8 * scale


@numba.njit(error_model="numpy")
def encode_uint8(planes, first, count, room, at):
    wide_vectors()
    codes, scales = planes
    _store_scales(scales, first, count, room, at)
    for block in range(count // BLOCK):
        per_scale = _TOP_UINT8 / scales[np.uintp(first // BLOCK + block)]
        per_root = np.sqrt(per_scale)
        for j in range(BLOCK):
            i = np.uintp(block * BLOCK + j)
            x = room[np.uintp(at) + i]
            root = room[np.uintp(at + TILE) + i] * per_root
            root = root if root > _f32(1.25) else _f32(1.25)
            # Down to a whole number, but to the one below where a tie goes there; then it goes up.
            bits = float_to_bits(root + _f32(8388607.5))
            code = float_from_bits(bits) - _ONES
            limit = room[np.uintp(at + 2 * TILE) + i] * (code + _f32(0.5))
            up = x * per_scale - code * code > limit
            byte = add32(bits, _u32(1)) if up else bits
            byte = byte if x > _f32(0.0) else _u32(0)
            codes[np.uintp(first) + i] = np.uint8(and32(byte, _u32(0xFF)))


BLOCK_CODECS = {
    "int8": (decode_int8, encode_int8),
    "uint8": (decode_uint8, encode_uint8),
}
