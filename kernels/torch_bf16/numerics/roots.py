"""The correctly rounded square root of fp32 numbers, on any device."""

from __future__ import annotations

import functools
from math import nan

import torch
from torch import Tensor

__all__ = ["has_fp64", "sqrt", "sqrt_without_fp64"]


def sqrt(x: Tensor) -> Tensor:
    """The square root of fp32 numbers, as IEEE 754 rounds it.

    Args:
        x: fp32, any shape and strides; the dtype is not checked.

    Returns:
        A new fp32 tensor of that shape.

    Example:
        >>> sqrt(torch.tensor([2.0, 0.25]))
        tensor([1.4142, 0.5000])
    """
    # torch's own root is off by an ulp for 6 numbers in 1000 on CPUs. Computed in fp64 and rounded
    # again, it is correct: 53 bits are more than 2 * 24 + 2.
    return x.double().sqrt().float() if has_fp64(x.device) else sqrt_without_fp64(x)


@functools.cache
def has_fp64(device: torch.device) -> bool:
    """Whether a device computes in fp64: Apple's and some of Intel's GPUs do not."""
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device).has_fp64
    return device.type != "mps"


def sqrt_without_fp64(x: Tensor) -> Tensor:
    """:func:`sqrt` by an fp32 root that may be off by 30 ulp, corrected in integers.

    No operation here meets a subnormal, because such devices may flush them. Args and result as for
    :func:`sqrt`.
    """
    bits = x.view(torch.int32)
    # A subnormal is its fraction, a whole number, times 2**-149.
    subnormal = bits < 0x00800000
    parts = torch.where(subnormal, (bits & 0x007FFFFF).float().view(torch.int32), bits)
    exponent = (parts >> 23) - 127 - 149 * subnormal.int()
    # x = n * 2**(exponent - 23) with an even exponent; its root is that of n * 2**23, in ulps.
    odd = exponent & 1
    n = (parts & 0x007FFFFF | 0x00800000) << odd
    root = (n.float() * 2.0**23).sqrt().int()
    # The difference fits in 32 bits, so it is exact even though the products overflow.
    root += ((n << 23) - root * root).float().div(2.0 * root.float()).round().int()
    left = (n << 23) - root * root
    # The exact root is within 1/2 of the nearest whole number; there are no ties.
    root += (left > root).int() - (left <= -root).int()
    found = (root + ((((exponent - odd) >> 1) + 126) << 23)).view(torch.float32)
    # Both zeros, infinity and NaN are their own roots; below zero there is none.
    found = torch.where((bits <= 0) | (bits >= 0x7F800000), x, found)
    return torch.where((bits < 0) & (bits << 1 != 0) & (x == x), nan, found)
