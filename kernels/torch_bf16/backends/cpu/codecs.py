"""The storage formats in Numba's dialect: how one number is decoded to fp32 and encoded back.

``decode(planes, i)`` reads element ``i``; ``encode(planes, i, x, k0, k1, index, shift)`` writes it.
``planes`` is a tuple of one-dimensional arrays in the order of ``Format.planes``, bf16 as uint16;
``k0, k1`` are the noise keys of this tensor, stream and step, ``index`` the low 32 bits of the
element's global index and ``shift`` that of the number's ``Draw``.
"""

from __future__ import annotations

import numba
import numpy as np

from .bits import (
    add32,
    and32,
    float_from_bits,
    float_to_bits,
    max32,
    min32,
    mul32,
    or32,
    shl32,
    shr32,
    xor32,
)

__all__ = ["CODECS"]

_u32 = np.uint32
_SIGN, _MAGNITUDE = _u32(0x80000000), _u32(0x7FFFFFFF)
_INFINITY, _LARGEST, _QUIET = _u32(0x7F800000), _u32(0x7F7FFFFF), _u32(0x00400000)
_HALF, _LOW, _ONE = _u32(0x8000), _u32(0xFFFF), _u32(1)
_S8, _S11, _S15, _S16, _S17 = _u32(8), _u32(11), _u32(15), _u32(16), _u32(17)
_M1, _M2, _M3 = _u32(0xED5AD4BB), _u32(0xAC4C1B51), _u32(0x31848BAB)


@numba.njit
def noise16(k0, k1, index, shift):
    """``counter_rng``'s word for one element, and of it the 16 bits above ``shift``."""
    x = xor32(index, k0)
    x = mul32(xor32(x, shr32(x, _S17)), _M1)
    x = add32(xor32(x, shr32(x, _S11)), k1)
    x = mul32(x, _M2)
    x = mul32(xor32(x, shr32(x, _S15)), _M3)
    return and32(shr32(xor32(x, shr32(x, _S16)), shift), _LOW)


@numba.njit
def load_bf16(plane, i):
    return float_from_bits(shl32(_u32(plane[i]), _S16))


@numba.njit
def nearest16(x):
    bits = float_to_bits(x)
    rounded = add32(add32(bits, _u32(0x7FFF)), and32(shr32(bits, _S16), _ONE))
    nan = and32(bits, _MAGNITUDE) > _INFINITY
    return shr32(or32(bits, _QUIET) if nan else rounded, _S16)


@numba.njit
def add_noise(magnitude, r):
    # Noise moves a finite number up to the largest one and leaves Inf and NaN where they are.
    return min32(add32(magnitude, r), max32(magnitude, _LARGEST))


@numba.njit
def stochastic16(x, r):
    bits = float_to_bits(x)
    magnitude = and32(bits, _MAGNITUDE)
    moved = add_noise(magnitude, r)
    quiet = or32(moved, _QUIET) if magnitude > _INFINITY else moved
    return shr32(or32(quiet, and32(bits, _SIGN)), _S16)


@numba.njit
def decode_fp32(planes, i):
    return planes[0][i]


@numba.njit
def encode_fp32(planes, i, x, k0, k1, index, shift):
    planes[0][i] = x


@numba.njit
def decode_bf16(planes, i):
    return load_bf16(planes[0], i)


@numba.njit
def encode_bf16_nearest(planes, i, x, k0, k1, index, shift):
    planes[0][i] = np.uint16(nearest16(x))


@numba.njit
def encode_bf16_stochastic(planes, i, x, k0, k1, index, shift):
    planes[0][i] = np.uint16(stochastic16(x, noise16(k0, k1, index, shift)))


@numba.njit
def visible_half(bits):
    nan = and32(bits, _MAGNITUDE) > _INFINITY
    return np.uint16(shr32(or32(bits, _QUIET) if nan else add32(bits, _HALF), _S16))


@numba.njit
def decode_remainder16(planes, i):
    high = shl32(_u32(planes[0][i]), _S16)
    magnitude = and32(high, _MAGNITUDE)
    nan = magnitude > _INFINITY
    # Beside a zero the top bit of the low half is stale, and subtracting it would give a NaN.
    low = and32(_u32(planes[1][i]), _u32(0x7FFF) if magnitude == _u32(0) else _LOW)
    # Sign-extending the low half is subtracting 0x10000 where its top bit is set.
    borrow = shl32(and32(low, _HALF), _ONE)
    signed = add32(add32(high, low), add32(xor32(borrow, _u32(0xFFFFFFFF)), _ONE))
    return float_from_bits(or32(high, low) if nan else signed)


@numba.njit
def encode_remainder16(planes, i, x, k0, k1, index, shift):
    bits = float_to_bits(x)
    planes[0][i] = visible_half(bits)
    planes[1][i] = np.uint16(and32(bits, _LOW))


@numba.njit
def decode_remainder8(planes, i):
    high = shl32(_u32(planes[0][i]), _S16)
    byte = _u32(planes[1][i])
    # Flipping the top bit and subtracting it again extends the sign.
    low = shl32(add32(xor32(byte, _u32(0x80)), _u32(0xFFFFFF80)), _S8)
    # Beside a zero the top bit is stale, and subtracting it would give a NaN.
    zero = and32(high, _MAGNITUDE) == _u32(0)
    return float_from_bits(add32(high, and32(low, _u32(0x7FFF)) if zero else low))


@numba.njit
def stochastic24(x, r):
    """Bits of ``x`` with noise of 8 bits; the lowest 8 are still to be dropped."""
    bits = float_to_bits(x)
    return or32(add_noise(and32(bits, _MAGNITUDE), r), and32(bits, _SIGN))


@numba.njit
def encode_remainder8(planes, i, x, k0, k1, index, shift):
    bits = stochastic24(x, shr32(noise16(k0, k1, index, shift), _S8))
    planes[0][i] = visible_half(bits)
    planes[1][i] = np.uint8(and32(shr32(bits, _S8), _u32(0xFF)))


@numba.njit
def decode_master32(planes, i):
    # A weight written from outside no longer is the rounded master: then the weight counts.
    visible = _u32(planes[0][i])
    master = planes[1][i]
    return master if nearest16(master) == visible else float_from_bits(shl32(visible, _S16))


@numba.njit
def encode_master32(planes, i, x, k0, k1, index, shift):
    planes[0][i] = np.uint16(nearest16(x))
    planes[1][i] = x


CODECS = {
    "fp32": (decode_fp32, encode_fp32),
    "bf16_nearest": (decode_bf16, encode_bf16_nearest),
    "bf16_stochastic": (decode_bf16, encode_bf16_stochastic),
    "remainder16": (decode_remainder16, encode_remainder16),
    "remainder8": (decode_remainder8, encode_remainder8),
    "master32": (decode_master32, encode_master32),
}
