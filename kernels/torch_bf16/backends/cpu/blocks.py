"""The formats of whole blocks in Numba's dialect: 64 numbers are decoded and encoded together.

``decode(planes, i, scale)`` reads element ``i`` of a block whose scale it is given.
``encode(planes, first, room, at)`` writes the block that starts at element
``first``, from 64 numbers in ``room``, from ``at`` on, and behind them, where the format is
stochastic, what ``threshold`` made of their noise. These are short loops over memory on the stack,
each of which becomes vector instructions.
"""

from __future__ import annotations

import numba
import numpy as np

from torch_bf16.formats import BLOCK

from .bits import add32, and32, float_from_bits, float_to_bits, max32, or32, shl32, xor32

__all__ = ["BLOCK_CODECS", "threshold"]

_u32, _f32 = np.uint32, np.float32
_SIGN, _MAGNITUDE, _INFINITY = _u32(0x80000000), _u32(0x7FFFFFFF), _u32(0x7F800000)
_QUIET, _SMALLEST_SCALE, _S7 = _u32(0x00400000), _u32(0x0D800000), _u32(7)
# 2**23 and 1.5 * 2**23: beside them, the last bits of a float count ones.
_ONES, _SIGNED_ONES = _f32(8388608.0), _f32(12582912.0)
_TOP_INT8, _TOP_UINT8 = _f32(127.0**2), _f32(255.0**2)
_UNIT_INT8, _UNIT_UINT8 = _f32(1 / 127.0**2), _f32(1 / 255.0**2)


@numba.njit
def _scale(room, at):
    largest = _u32(0)
    # As integers, NaN is above infinity and that above all numbers.
    for j in range(BLOCK):
        largest = max32(largest, and32(float_to_bits(room[at + j]), _MAGNITUDE))
    if largest == _u32(0):
        return _f32(0.0)
    bits = max32(largest, _SMALLEST_SCALE)
    return float_from_bits(or32(bits, _QUIET) if bits >= _INFINITY else bits)


@numba.njit
def decode_int8(planes, i, scale):
    bits = or32(xor32(_u32(planes[0][i]), _u32(0x80)), _u32(0x4B000000))
    code = float_from_bits(bits) - _f32(8388736.0)
    return code * abs(code) * _UNIT_INT8 * scale


@numba.njit(error_model="numpy")
def encode_int8(planes, first, room, at):
    scale = _scale(room, at)
    planes[1][first // BLOCK] = scale
    per_scale = _TOP_INT8 / scale
    for j in range(BLOCK):
        x = room[at + j]
        square = abs(x) * per_scale
        # Not of a NaN, which no integer is.
        root = np.sqrt(square if square > _f32(0.0) else _f32(0.0))
        signed = or32(float_to_bits(root), and32(float_to_bits(x), _SIGN))
        code = float_to_bits(float_from_bits(signed) + _SIGNED_ONES)
        planes[0][np.uintp(first + j)] = np.uint8(and32(code, _u32(0xFF)))


@numba.njit
def threshold(r):
    """Of the odd multiples of 2**-15 below 2, the one that 16 random bits stand for."""
    draw = or32(and32(r, _u32(0xFFFC)), _u32(2))
    return float_from_bits(or32(shl32(draw, _S7), _u32(0x40000000))) - _f32(2.0)


@numba.njit
def decode_uint8(planes, i, scale):
    code = float_from_bits(or32(_u32(planes[0][i]), _u32(0x4B000000))) - _ONES
    return code * code * _UNIT_UINT8 * scale


@numba.njit(error_model="numpy")
def encode_uint8(planes, first, room, at):
    scale = _scale(room, at)
    planes[1][first // BLOCK] = scale
    per_scale = _TOP_UINT8 / scale
    for j in range(BLOCK):
        x = room[at + j]
        square = x * per_scale
        square = square if square >= _f32(1.0) else _f32(1.0)
        # Down to a whole number, but to the one below where a tie goes there; then it goes up.
        bits = float_to_bits(np.sqrt(square) + _f32(8388607.5))
        code = float_from_bits(bits) - _ONES
        up = square - code * code > room[at + BLOCK + j] * (code + _f32(0.5))
        byte = add32(bits, _u32(1)) if up else bits
        byte = byte if x > _f32(0.0) else _u32(0)
        planes[0][np.uintp(first + j)] = np.uint8(and32(byte, _u32(0xFF)))


BLOCK_CODECS = {
    "int8": (decode_int8, encode_int8),
    "uint8": (decode_uint8, encode_uint8),
}
