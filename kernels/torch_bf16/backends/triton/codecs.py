"""The storage formats in Triton's dialect: how numbers are decoded to fp32 and encoded back.

``decode(FORMAT, planes)`` returns fp32; ``encode(FORMAT, x, words, WORD, SHIFT, TOGETHER)``, for an
``x`` that is the result of an operation, returns the planes, in the order of ``Format.planes``. A
plane of four-byte elements is float32. A plane of two-byte elements is uint32 with the element in
the upper half, where fp32 has the bits of a bf16; a plane of single bytes has them in the top byte.
Storing drops the bits below. A plane of scales has one for each 64 elements. Triton's bf16 type is
not used, because its conversion truncates in the interpreter. ``words`` are random words; a
stochastic format takes the 16 bits from ``SHIFT`` on of word number ``WORD``. ``TOGETHER`` is for
square roots, see :mod:`.ieee`. The format's name is a compile-time constant, so only its branch is
compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .ieee import div, sqrt

__all__ = ["decode", "encode", "key_pair", "noise_word"]

SMALLEST_SCALE = tl.constexpr(0x0D800000)
LARGEST_24 = tl.constexpr(3.4027717462407993e38)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def key_pair(t0, t1, step, index_hi):
    """Compute the keys of a block, as ``counter_rng.block_keys`` does."""
    k0 = _mix32((t0 ^ (index_hi * 0x85EBCA6B)) + step * 0x9E3779B9)
    return k0, _mix32(t1 ^ k0)


@triton.jit
def noise_word(k0, k1, index, OF_EIGHT: tl.constexpr):
    """``counter_rng``'s word for each element, without its last exclusive or: see ``_draw16``.

    With ``OF_EIGHT``, ``index`` has only the multiples of eight and the result is eight times as
    long: the first shift drops the lowest three bits, so that eight elements share its cost.
    """
    x = index ^ k0
    x ^= x >> 17
    if OF_EIGHT:
        each = tl.arange(0, 8).to(tl.uint32)[None, :]
        x = (x[:, None] ^ each).reshape(8 * index.shape[0])
    x *= 0xED5AD4BB
    x = ((x ^ (x >> 11)) + k1) * 0xAC4C1B51
    return (x ^ (x >> 15)) * 0x31848BAB


@triton.jit
def _draw16(word, SHIFT: tl.constexpr):
    tl.static_assert(SHIFT == 0 or SHIFT == 16)
    # word ^ (word >> 16) is the finished word; its upper half is that of `word`.
    return word >> 16 if SHIFT == 16 else (word ^ (word >> 16)) & 0xFFFF


@triton.jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _quiet(x, bits):
    # A NaN with a payload in its lower half alone would be truncated to Inf.
    return tl.where(x != x, _bits(x) | 0x00400000, bits)


@triton.jit
def _nearest(x):
    # Every NaN that an operation returns has its quiet bit set.
    bits = _bits(x)
    return tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits)


@triton.jit
def _stochastic(x, r):
    bits = _bits(x)
    # Nothing is added above the largest bf16: such numbers are truncated to it; Inf and NaN stay.
    return tl.where(tl.abs(x) <= 3.3895313892515355e38, bits + r, bits)


@triton.jit
def _join16(high, low_half):
    low = low_half.to(tl.int32, bitcast=True) >> 16
    magnitude = high & 0x7FFFFFFF
    # Beside a zero the top bit of the low half is stale, and subtracting it would give a NaN.
    low = tl.where(magnitude == 0, low & 0x7FFF, low).to(tl.uint32, bitcast=True)
    return _float(tl.where(magnitude > 0x7F800000, high | (low & 0xFFFF), high + low))


@triton.jit
def _split16(x):
    bits = _bits(x)
    return tl.where(x == x, bits + 0x8000, bits), bits << 16


@triton.jit
def _stochastic8(x, r):
    # Nothing is added above the largest 24-bit float; Inf and NaN stay.
    bits = tl.where(tl.abs(x) <= LARGEST_24, _bits(x) + r, _bits(x))
    return tl.where(x == x, bits + 0x8000, bits), bits << 16


@triton.jit
def _join8(high, byte):
    low = (byte.to(tl.int32, bitcast=True) >> 24) << 8
    # Beside a zero the top bit is stale, and subtracting it would give a NaN.
    low = tl.where((high & 0x7FFFFFFF) == 0, low & 0x7FFF, low)
    return _float(high + low.to(tl.uint32, bitcast=True))


@triton.jit
def _in_blocks(x):
    """``x`` as a matrix, with a row for each 64 neighbours."""
    return x.reshape(x.shape[0] // 64, 64)


@triton.jit
def _times(x, of_blocks):
    return (_in_blocks(x) * of_blocks[:, None]).reshape(x.shape[0])


@triton.jit
def _from_codes(code, scale, UNIT: tl.constexpr):
    return _times(code * tl.abs(code) * UNIT, scale)


@triton.jit
def _scales(x):
    # As integers, NaN is above infinity, and infinity above all numbers.
    magnitude = (_bits(x) & 0x7FFFFFFF).to(tl.int32, bitcast=True)
    largest = tl.max(_in_blocks(magnitude), axis=1)
    scale = tl.where(largest == 0, 0, tl.maximum(largest, SMALLEST_SCALE))
    scale = tl.where(scale >= 0x7F800000, scale | 0x00400000, scale)
    return scale.to(tl.float32, bitcast=True)


@triton.jit
def _per_scale(scale, TOP: tl.constexpr):
    return div(tl.full(scale.shape, TOP, tl.float32), scale, False)


@triton.jit
def _int8(x, TOGETHER: tl.constexpr):
    scale = _scales(x)
    root = _times(sqrt(tl.abs(x), TOGETHER), sqrt(_per_scale(scale, 16129.0), False))
    # NaN has no code: it becomes 0.
    root = tl.where(root > 0, root, 0.0)
    signed = _float(_bits(root) | (_bits(x) & 0x80000000))
    # Adding 1.5 * 2**23 rounds to an integer and leaves it in the lowest bits.
    return _bits(signed + 12582912.0) << 24, scale


@triton.jit
def _uint8(x, r, TOGETHER: tl.constexpr):
    scale = _scales(x)
    per_scale = _per_scale(scale, 65025.0)
    # Two roots and a product, so that a rule that takes the root of its second moment shares it.
    root = _times(sqrt(x, TOGETHER), sqrt(per_scale, False))
    root = tl.where(root > 1.25, root, 1.25)
    # Rounds down; an integer is a tie, and may become the one below. The draw may add one.
    bits = _bits(root + 8388607.5)
    code = _float(bits) - 8388608.0
    threshold = _float((((r & 0xFFFC) | 2) << 7) | 0x40000000) - 2.0
    up = _times(x, per_scale) - code * code > threshold * (code + 0.5)
    byte = tl.where(up, bits + 1, bits) << 24
    return tl.where(x > 0, byte, 0), scale


@triton.jit
def decode(FORMAT: tl.constexpr, planes):
    """Planes -> fp32."""
    if FORMAT == "fp32":
        return planes[0]
    elif FORMAT == "bf16_nearest" or FORMAT == "bf16_stochastic":
        return _float(planes[0])
    elif FORMAT == "bf16+16":
        return _join16(planes[0], planes[1])
    elif FORMAT == "bf16+8":
        return _join8(planes[0], planes[1])
    elif FORMAT == "int8":
        code = _float((planes[0] >> 24) ^ 0x4B000080) - 8388736.0
        return _from_codes(code, planes[1], 1 / 16129)
    elif FORMAT == "uint8":
        code = _float((planes[0] >> 24) | 0x4B000000) - 8388608.0
        return _from_codes(code, planes[1], 1 / 65025)
    elif FORMAT == "bf16+fp32":
        # A weight that differs from the rounded master was written by something else, and counts.
        kept = (_quiet(planes[1], _nearest(planes[1])) & 0xFFFF0000) == planes[0]
        return tl.where(kept, planes[1], _float(planes[0]))
    else:
        tl.static_assert(False, "a format without a codec in Triton's dialect")


@triton.jit
def encode(
    FORMAT: tl.constexpr,
    x,
    words,
    WORD: tl.constexpr,
    SHIFT: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """fp32 -> planes."""
    if FORMAT == "fp32":
        return (x,)
    elif FORMAT == "bf16_nearest":
        return (_nearest(x),)
    elif FORMAT == "bf16_stochastic":
        return (_stochastic(x, _draw16(words[WORD], SHIFT)),)
    elif FORMAT == "bf16+16":
        return _split16(x)
    elif FORMAT == "bf16+8":
        return _stochastic8(x, _draw16(words[WORD], SHIFT) >> 8)
    elif FORMAT == "int8":
        return _int8(x, TOGETHER)
    elif FORMAT == "uint8":
        return _uint8(x, _draw16(words[WORD], SHIFT), TOGETHER)
    elif FORMAT == "bf16+fp32":
        return _nearest(x), x
    else:
        tl.static_assert(False, "a format without a codec in Triton's dialect")
