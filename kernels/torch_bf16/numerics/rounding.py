"""Rounding fp32 numbers to bf16, defined on bits.

Every backend writes these functions in its own dialect and must agree with them bit for bit.
They work on any device that has int32 arithmetic.

Contract of `bf16_nearest` (round to nearest, ties to even) and `bf16_stochastic` (sign and
magnitude, with a uniform 16-bit integer ``r``):

- A NaN becomes a quiet NaN: ``(bits | 0x00400000) >> 16``. Sign and upper payload are kept. Adding
  to the bits of a NaN, as the usual bit tricks do, turns 0x7fffffff into -0.0.
- An infinity is unchanged.
- A finite number that bf16 represents, ±0 included, is unchanged. Subnormals follow the same rule
  as normal numbers.
- Any other finite number, nearest: the closer neighbour; beyond the largest bf16 it overflows to
  infinity as IEEE 754 says, which is what torch's own cast does.
- Any other finite number, stochastic: ``(magnitude + r) >> 16``, so the share of the 65,536 values
  of ``r`` that round away from zero is exactly the dropped half / 65,536. Beyond the largest bf16
  it saturates there: noise never makes an infinity out of a finite number.

Contract of `split16` and `join16`: ``join16(*split16(x))`` has the bits of ``x`` for all 2**32
patterns, except that a signalling NaN comes back quiet. The visible half is the nearest bf16, ties
away from zero, so the sign of the lower half says from which side it came.

`split8` and `join8` keep the upper 24 bits in the same way: the number is first rounded to them
stochastically, as `bf16_stochastic` rounds to 16, by a uniform 8-bit integer added to the
magnitude, and what is a float of 24 bits already comes back bit for bit, whatever was drawn.
"""

import torch
from torch import Tensor

__all__ = [
    "INFINITY",
    "MAGNITUDE",
    "QUIET",
    "bf16_nearest",
    "bf16_stochastic",
    "join8",
    "join16",
    "split8",
    "split16",
]

MAGNITUDE, INFINITY, QUIET = 0x7FFFFFFF, 0x7F800000, 0x00400000
"""Bits of an fp32 number: all but the sign, those of an infinity, and the one of a quiet NaN."""

_SIGN, _LARGEST_FINITE = -0x80000000, 0x7F7FFFFF


def bf16_nearest(x: Tensor) -> Tensor:
    """Round to the nearest bf16, ties to even.

    Args:
        x: fp32, any shape and strides.

    Returns:
        bf16, the shape of ``x``.

    Raises:
        ValueError: if ``x`` is not fp32.

    Example:
        >>> bf16_nearest(torch.tensor([1.001, 1.005]))
        tensor([1.0000, 1.0078], dtype=torch.bfloat16)
    """
    bits = _bits_of_fp32(x, "bf16_nearest")
    # No carry reaches the sign: the magnitude of a number that is not NaN ends at 0x7f800000.
    return _upper_half(bits, bits + 0x7FFF + ((bits >> 16) & 1))


def bf16_stochastic(x: Tensor, r: Tensor) -> Tensor:
    """Round away from zero with a probability equal to the discarded fraction, exactly.

    Args:
        x: fp32, any shape and strides.
        r: int32 in [0, 65535], uniform, the shape of ``x``. The range is not checked.

    Returns:
        bf16, the shape of ``x``.

    Raises:
        ValueError: if ``x`` is not fp32 or ``r`` is not int32.

    Example:
        >>> lowest_and_highest = torch.tensor([0, 65535], dtype=torch.int32)
        >>> bf16_stochastic(torch.tensor([1.001, 1.001]), lowest_and_highest)
        tensor([1.0000, 1.0078], dtype=torch.bfloat16)
    """
    bits = _bits_of_fp32(x, "bf16_stochastic")
    _check_draws(r, 65535, "bf16_stochastic")
    bits = _noisy(bits, r)
    return _upper_half(bits, bits)


def split16(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 losslessly into the nearest bf16 and the 16 bits that it lacks.

    Args:
        x: fp32, any shape and strides.

    Returns:
        ``(hi, lo)``: bf16 and int16, both of the shape of ``x``. ``lo`` is how much
        larger the magnitude of ``x`` is than that of ``hi``, in units of the last place of fp32;
        beside a NaN it is the lower payload.

    Raises:
        ValueError: if ``x`` is not fp32.

    Example:
        >>> split16(torch.tensor([1.001]))
        (tensor([1.], dtype=torch.bfloat16), tensor([8389], dtype=torch.int16))
    """
    bits = _bits_of_fp32(x, "split16")
    return _upper_half(bits, bits + 0x8000), bits.to(torch.int16)


def join16(hi: Tensor, lo: Tensor) -> Tensor:
    """Join the two parts that `split16` returned.

    Beside a zero, ``lo`` is never negative. If it is, the weight was zeroed in a way that cannot be
    noticed (``p.data.mul_(mask)``) and ``lo`` is stale: subtracting it would borrow from the sign
    and give a NaN, so its top bit is ignored there.

    Args:
        hi: bf16, any shape and strides.
        lo: int16, the shape of ``hi``.

    Returns:
        fp32, the shape of ``hi``.

    Raises:
        ValueError: if ``hi`` is not bf16 or ``lo`` is not int16.

    Example:
        >>> x = torch.randn(3, 5)
        >>> torch.equal(join16(*split16(x)), x)
        True
    """
    upper, lower = _joined_bits(hi, lo, torch.int16, "join16")
    # A visible infinity may stand for a finite number just below it, so it is not special.
    joined = torch.where(_is_nan(upper), upper | (lower & 0xFFFF), upper + lower)
    zero = (upper & MAGNITUDE) == 0
    return torch.where(zero, upper | (lower & 0x7FFF), joined).view(torch.float32)


def split8(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Round stochastically to a float of 24 bits, and split that as `split16` does.

    Args:
        x: fp32, any shape and strides.
        r: int32 in [0, 255], uniform, the shape of ``x``. The range is not checked.

    Returns:
        ``(hi, lo)``: bf16 and int8, both of the shape of ``x``. ``lo`` is how much
        larger the magnitude of the rounded number is than that of ``hi``, in units of 2**8 last
        places of fp32; beside a NaN it means nothing.

    Raises:
        ValueError: if ``x`` is not fp32 or ``r`` is not int32.

    Example:
        >>> split8(torch.tensor([0.1]), torch.tensor([0], dtype=torch.int32))
        (tensor([0.1001], dtype=torch.bfloat16), tensor([-52], dtype=torch.int8))
    """
    bits = _bits_of_fp32(x, "split8")
    _check_draws(r, 255, "split8")
    bits = _noisy(bits, r)
    return _upper_half(bits, bits + 0x8000), (bits >> 8).to(torch.int8)


def join8(hi: Tensor, lo: Tensor) -> Tensor:
    """Join the two parts that `split8` returned.

    Beside a zero the top bit of ``lo`` is ignored, as in `join16`; a NaN comes back as a NaN.

    Args:
        hi: bf16, any shape and strides.
        lo: int8, the shape of ``hi``.

    Returns:
        fp32, the shape of ``hi``.

    Raises:
        ValueError: if ``hi`` is not bf16 or ``lo`` is not int8.

    Example:
        >>> parts = split8(torch.tensor([0.1]), torch.tensor([0], dtype=torch.int32))
        >>> join8(*parts).item()
        0.09999847412109375
    """
    upper, lower = _joined_bits(hi, lo, torch.int8, "join8")
    lower <<= 8
    zero = (upper & MAGNITUDE) == 0
    return (upper + torch.where(zero, lower & 0x7FFF, lower)).view(torch.float32)


def _bits_of_fp32(x: Tensor, function: str) -> Tensor:
    if x.dtype != torch.float32:
        raise ValueError(
            f"{function}: x has dtype {x.dtype}, but the contract is one rounding from fp32; "
            "compute in fp32 and pass that result"
        )
    return x.detach().view(torch.int32)


def _is_nan(bits: Tensor) -> Tensor:
    return (bits & MAGNITUDE) > INFINITY


def _check_draws(r: Tensor, top: int, function: str) -> None:
    if r.dtype != torch.int32:
        raise ValueError(
            f"{function}: r has dtype {r.dtype}, but the draws are added to 32-bit patterns; "
            f"pass int32 values in [0, {top}]"
        )


def _noisy(bits: Tensor, r: Tensor) -> Tensor:
    """Add ``r`` to the magnitude of finite numbers, up to the largest; Inf and NaN stay."""
    magnitude = bits & MAGNITUDE
    rounded = (magnitude + r).clamp_(max=_LARGEST_FINITE) | (bits & _SIGN)
    return torch.where(magnitude < INFINITY, rounded, bits)


def _upper_half(bits: Tensor, rounded: Tensor) -> Tensor:
    """bf16: the upper half of ``rounded``, or for a NaN that of ``bits``, made quiet."""
    result = torch.where(_is_nan(bits), bits | QUIET, rounded)
    # The arithmetic shift leaves a value in the range of int16, so the cast loses nothing.
    return (result >> 16).to(torch.int16).view(torch.bfloat16)


def _joined_bits(
    hi: Tensor, lo: Tensor, dtype: torch.dtype, function: str
) -> tuple[Tensor, Tensor]:
    """Both parts as int32, ``hi`` in the upper half."""
    if hi.dtype != torch.bfloat16 or lo.dtype != dtype:
        raise ValueError(
            f"{function}: the parts have dtypes {hi.dtype} and {lo.dtype}; it takes the two "
            f"results of {function.replace('join', 'split')}, torch.bfloat16 and {dtype}"
        )
    return hi.detach().view(torch.int16).to(torch.int32) << 16, lo.to(torch.int32)
