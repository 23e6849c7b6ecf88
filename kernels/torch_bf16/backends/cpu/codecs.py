"""The storage formats in Numba's dialect: how one number is decoded to fp32 and encoded back.

``decode(values)`` returns fp32; ``encode(x, r)`` returns the values, in the order of
``Format.planes``, where ``r`` is 16 random bits. A value is an element of a plane as
:mod:`.loads_stores` loads it: uint32 with two bytes in its upper half or one in its top byte, or
float32. ``x`` is the result of an operation, so a NaN is quiet and stays one when its lower half is
dropped.
"""

from __future__ import annotations

import numpy as np

from .bits import (
    add32,
    and32,
    float_from_bits,
    float_to_bits,
    inlined,
    mul32,
    or32,
    shl32,
    shr32,
    sub32,
    xor32,
)

__all__ = ["CODECS", "lower_draw", "upper_draw", "word", "word_pair"]

_u32, _f32 = np.uint32, np.float32
_MAGNITUDE, _INFINITY, _QUIET = _u32(0x7FFFFFFF), _u32(0x7F800000), _u32(0x00400000)
_HALF, _LOW, _HIGH, _ONE = _u32(0x8000), _u32(0xFFFF), _u32(0xFFFF0000), _u32(1)
_S8, _S11, _S15, _S16, _S17 = _u32(8), _u32(11), _u32(15), _u32(16), _u32(17)
_M1, _M2, _M3 = _u32(0xED5AD4BB), _u32(0xAC4C1B51), _u32(0x31848BAB)
# The largest floats of 16 and of 24 bits.
_LARGEST_16, _LARGEST_24 = _f32(3.3895313892515355e38), _f32(3.4027717462407993e38)


@inlined
def _mixed(x, k1):
    x = mul32(x, _M1)
    x = add32(xor32(x, shr32(x, _S11)), k1)
    x = mul32(x, _M2)
    return mul32(xor32(x, shr32(x, _S15)), _M3)


@inlined
def word(k0, k1, index):
    """``counter_rng``'s word of an element, without its last exclusive or: see the draws."""
    x = xor32(index, k0)
    return _mixed(xor32(x, shr32(x, _S17)), k1)


@inlined
def word_pair(k0, k1, index, near):
    """The :func:`word` of two elements.

    The first ``index`` is even, and ``near`` in the same block of 2**17. The first shift has the
    same result for the whole block, so a loop computes it once, from ``near``.
    """
    x = xor32(index, xor32(k0, shr32(xor32(near, k0), _S17)))
    return _mixed(x, k1), _mixed(xor32(x, _ONE), k1)


@inlined
def upper_draw(word):
    return shr32(word, _S16)


@inlined
def lower_draw(word):
    return and32(xor32(word, shr32(word, _S16)), _LOW)


@inlined
def _nearest(x):
    bits = float_to_bits(x)
    up = add32(and32(shr32(bits, _S16), _ONE), _u32(0x7FFF))
    return add32(bits, up if x == x else _u32(0))


@inlined
def _stochastic(x, r):
    # Nothing is added above the largest bf16: such numbers are truncated to it; Inf and NaN stay.
    return add32(float_to_bits(x), r if abs(x) <= _LARGEST_16 else _u32(0))


@inlined
def _visible(x, bits):
    """The bf16 of a number stored in two planes: rounded to nearest, ties away from zero."""
    return add32(bits, _HALF if x == x else _u32(0))


@inlined
def decode_fp32(values):
    return values[0]


@inlined
def encode_fp32(x, r):
    return (x,)


@inlined
def decode_bf16(values):
    return float_from_bits(values[0])


@inlined
def encode_bf16_nearest(x, r):
    return (_nearest(x),)


@inlined
def encode_bf16_stochastic(x, r):
    return (_stochastic(x, r),)


@inlined
def decode_bf16_plus_16(values):
    high, low = values[0], shr32(values[1], _S16)
    magnitude = and32(high, _MAGNITUDE)
    # Beside a zero the top bit of the low half is stale, and subtracting it would give a NaN.
    low = and32(low, _u32(0x7FFF)) if magnitude == _u32(0) else low
    # Sign-extending the low half means subtracting 0x10000 if its top bit is set.
    signed = sub32(add32(high, low), shl32(and32(low, _HALF), _ONE))
    return float_from_bits(or32(high, low) if magnitude > _INFINITY else signed)


@inlined
def encode_bf16_plus_16(x, r):
    bits = float_to_bits(x)
    return _visible(x, bits), shl32(bits, _S16)


@inlined
def decode_bf16_plus_8(values):
    high = values[0]
    # Flipping the top bit and subtracting it again extends the sign.
    low = sub32(xor32(shr32(values[1], _S16), _HALF), _HALF)
    # Beside a zero the top bit is stale, and subtracting it would give a NaN.
    zero = and32(high, _MAGNITUDE) == _u32(0)
    return float_from_bits(add32(high, and32(low, _u32(0x7FFF)) if zero else low))


@inlined
def encode_bf16_plus_8(x, r):
    # Nothing is added above the largest 24-bit float; Inf and NaN stay.
    noise = shr32(r, _S8) if abs(x) <= _LARGEST_24 else _u32(0)
    bits = add32(float_to_bits(x), noise)
    return _visible(x, bits), shl32(bits, _S16)


@inlined
def decode_bf16_plus_fp32(values):
    visible, master = values
    # A weight that differs from the rounded master was written by something else, and counts.
    rounded = or32(_nearest(master), _QUIET if master != master else _u32(0))
    return master if and32(rounded, _HIGH) == visible else float_from_bits(visible)


@inlined
def encode_bf16_plus_fp32(x, r):
    return _nearest(x), x


CODECS = {
    "fp32": (decode_fp32, encode_fp32),
    "bf16_nearest": (decode_bf16, encode_bf16_nearest),
    "bf16_stochastic": (decode_bf16, encode_bf16_stochastic),
    "bf16+16": (decode_bf16_plus_16, encode_bf16_plus_16),
    "bf16+8": (decode_bf16_plus_8, encode_bf16_plus_8),
    "bf16+fp32": (decode_bf16_plus_fp32, encode_bf16_plus_fp32),
}
