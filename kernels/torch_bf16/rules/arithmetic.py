"""The arithmetic that rules may use beyond ``+ - *`` and comparisons.

A rule calls these by module attribute (``arithmetic.sqrt``). A backend that lifts the rule swaps
this module for one with its own primitives (:func:`torch_bf16.rules.lift`); with this one a rule
runs on Python floats. Division is a primitive because ``/`` is an approximation in some dialects,
among them Triton's.

``update`` and ``statistic`` may use ``div`` and ``sqrt``, correctly rounded, and ``maximum``,
``minimum`` and ``sign``, which are exact. ``scalars`` and ``factor`` may use ``div``, ``sqrt``,
``where``, ``power``, ``exp`` and ``log``. No device shares the host's libraries, so the last three
are spelled out in operations that IEEE 754 rounds the same way everywhere: a dialect that follows
them step by step gets the same bits.
"""

from math import inf, nan, sqrt
from operator import truediv as div

__all__ = ["div", "exp", "log", "maximum", "minimum", "power", "sign", "sqrt", "where"]

LOG2_E = 1.4426950408889634
# ln 2 = LN2_HI + LN2_LO; the product of LN2_HI with a whole number below 2**11 is exact.
LN2_HI, LN2_LO = 6.93147180369123816490e-01, 1.90821492927058770002e-10
SQRT2 = 1.4142135623730951
# Adding and subtracting it rounds to the nearest whole number.
TO_WHOLE = 6755399441055744.0


def maximum(a, b):
    """The larger; ``b`` if both are zero; their sum, a quiet NaN, if one is NaN."""
    return a if a > b else b if b >= a else a + b


def minimum(a, b):
    """The smaller; ``b`` if both are zero; their sum, a quiet NaN, if one is NaN."""
    return a if a < b else b if b <= a else a + b


def sign(x):
    """1, -1, or +0.0 for either zero; a quiet NaN for a NaN."""
    return 1.0 if x > 0.0 else -1.0 if x < 0.0 else x - x


def where(condition, a, b):
    """``a`` if ``condition`` holds, else ``b``; both are evaluated."""
    return a if condition else b


def power(base, exponent):
    """``base`` to a whole ``exponent`` of 0 or more, by squaring.

    The relative error is up to about ``exponent`` units of 2**-53; for a decay rate, the absolute
    error is at most ``2**-53 / (1 - base)``.
    """
    result = 1.0
    while exponent > 0:
        if exponent % 2 == 1:
            result = result * base
        base = base * base
        exponent = exponent // 2
    return result


def exp(x):
    """e to the ``x``, to about 1 ulp; 0 below -708, where the result would be subnormal."""
    k = (x * LOG2_E + TO_WHOLE) - TO_WHOLE
    r = (x - k * LN2_HI) - k * LN2_LO
    y = 1.0
    for i in range(13, 0, -1):
        y = 1.0 + y * r / i
    n = 512
    while n > 0:
        if k >= n:
            k, y = k - n, y * 2.0**n
        if k <= -n:
            k, y = k + n, y * 2.0**-n
        n = n // 2
    return inf if x > 709.0 else 0.0 if x < -708.0 else y


def log(x):
    """The natural logarithm, to about 1 ulp, of numbers that are not subnormal."""
    k, m = 0.0, x
    n = 512
    while n > 0:
        if m >= 2.0**n:
            k, m = k + n, m * 2.0**-n
        if m < 2.0 ** (1 - n):
            k, m = k - n, m * 2.0**n
        n = n // 2
    if m > SQRT2:
        k, m = k + 1.0, m * 0.5
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    y = 0.0
    for i in range(23, 1, -2):
        y = (y + 1.0 / i) * z
    y = k * LN2_HI + (k * LN2_LO + (s + s) * (1.0 + y))
    return -inf if x == 0.0 else inf if x == inf else nan if x < 0.0 else y
