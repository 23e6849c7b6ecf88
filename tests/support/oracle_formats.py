"""What the formats must compute: a part of ``oracle.py``, in NumPy alone.

bf16 numbers are uint16 arrays of their bits. A *plane* is one stored array; a format stores a
number in one or two planes:

    fp32             (float32,)
    bf16_nearest     (uint16,)
    bf16_stochastic  (uint16,)
    bf16+16          (uint16, int16)     visible half, lower half of the exact master
    bf16+8           (uint16, int8)      the same of a float of 24 bits, rounded stochastically
    int8             (int8, float32)     signed codes, and a scale for each 64 numbers
    uint8            (uint8, float32)    the same for numbers that are not negative
    bf16+fp32        (uint16, float32)   visible half, exact master
"""

import numpy as np
from oracle_blocks import decode_codes, encode_int8, encode_uint8

STOCHASTIC = ("bf16_stochastic", "bf16+8", "uint8")


def decode(fmt, planes):
    """planes -> float32."""
    if fmt == "fp32":
        return planes[0].copy()
    if fmt in ("bf16_nearest", "bf16_stochastic"):
        return bf16_to_fp32(planes[0])
    if fmt == "bf16+16":
        return join16(*planes)
    if fmt == "bf16+8":
        return join8(*planes)
    if fmt in ("int8", "uint8"):
        return decode_codes(*planes, 127 if fmt == "int8" else 255)
    if fmt == "bf16+fp32":
        visible, master = planes
        # Whoever wrote the visible half since the last step is right.
        return np.where(bf16_nearest(master) == visible, master, bf16_to_fp32(visible))
    raise KeyError(fmt)


def encode(fmt, x, r=None):
    """float32 -> planes. r: the 16-bit draws, where the format is of STOCHASTIC."""
    if fmt == "fp32":
        return (x.copy(),)
    if fmt == "bf16_nearest":
        return (bf16_nearest(x),)
    if fmt == "bf16_stochastic":
        return (bf16_stochastic(x, r),)
    if fmt == "bf16+16":
        return split16(x)
    if fmt == "bf16+8":
        return split8(x, r >> 8)
    if fmt in ("int8", "uint8"):
        with np.errstate(all="ignore"):
            return encode_int8(x) if fmt == "int8" else encode_uint8(x, r)
    if fmt == "bf16+fp32":
        return bf16_nearest(x), x.copy()
    raise KeyError(fmt)


def bits_of(x):
    """uint64, so that no sum below can wrap around."""
    return np.asarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)


def from_bits(bits):
    return np.asarray(bits).astype(np.uint32).view(np.float32)


def bf16_nearest(x):
    sign, magnitude = _sign_and_magnitude(x)
    upper, dropped = magnitude >> 16, magnitude & 0xFFFF
    odd = upper % 2 == 1
    up = (dropped > 0x8000) | ((dropped == 0x8000) & odd)
    return _with_sign(sign, np.where(_nan(magnitude), upper | 0x40, upper + up))


def bf16_stochastic(x, r):
    """r: integers in [0, 65535]."""
    sign, magnitude = _sign_and_magnitude(x)
    upper, dropped = magnitude >> 16, magnitude & 0xFFFF
    up = dropped + np.asarray(r).astype(np.uint64) >= 0x10000
    finite = np.minimum(upper + up, 0x7F7F)
    infinite = np.full_like(upper, 0x7F80)
    special = np.where(_nan(magnitude), upper | 0x40, infinite)
    return _with_sign(sign, np.where(magnitude < 0x7F800000, finite, special))


def split16(x):
    sign, magnitude = _sign_and_magnitude(x)
    upper, lower = magnitude >> 16, magnitude & 0xFFFF
    up = lower >= 0x8000
    hi = _with_sign(sign, np.where(_nan(magnitude), upper | 0x40, upper + up))
    lo = lower.astype(np.int64)
    return hi, np.where(lo >= 0x8000, lo - 0x10000, lo).astype(np.int16)


def join16(hi, lo):
    upper = hi.astype(np.int64) * 0x10000
    nan, zero = (hi & 0x7FFF) > 0x7F80, (hi & 0x7FFF) == 0
    lo = lo.astype(np.int64)
    # Nothing lies below a zero: a negative half there is stale, and its top bit means nothing.
    return from_bits(upper + np.where(nan, lo % 0x10000, np.where(zero, lo % 0x8000, lo)))


def split8(x, r):
    """r: integers in [0, 255]. Round to 24 bits; then the halves of that, the lower one cut."""
    sign, magnitude = _sign_and_magnitude(x)
    up = (magnitude & 0xFF) + np.asarray(r).astype(np.uint64) >= 0x100
    finite = np.minimum((magnitude >> 8) + up, 0x7F7FFF)
    kept = np.where(magnitude < 0x7F800000, finite, magnitude >> 8)
    # A NaN may have its payload in the 8 lowest bits alone.
    kept = np.where(_nan(magnitude), kept | 0x4000, kept)
    hi, lo = split16(from_bits(sign << 31 | kept << 8))
    return hi, (lo.astype(np.int64) >> 8).astype(np.int8)


def join8(hi, lo):
    lo = lo.astype(np.int64)
    # Nothing lies below a zero. Beside a NaN the sum is a NaN, too.
    return from_bits(hi.astype(np.int64) * 0x10000 + np.where(hi & 0x7FFF, lo, lo % 128) * 256)


def bf16_to_fp32(b):
    return from_bits(b.astype(np.uint64) << 16)


def _sign_and_magnitude(x):
    bits = bits_of(x)
    return bits >> 31, bits & 0x7FFFFFFF


def _nan(magnitude):
    return magnitude > 0x7F800000


def _with_sign(sign, half):
    return (sign * 0x8000 + half).astype(np.uint16)
