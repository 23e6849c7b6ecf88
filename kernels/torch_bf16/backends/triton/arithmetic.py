"""The arithmetic of rules in Triton's dialect: fp32 for ``update``, fp64 for ``scalars``.

``power``, ``exp`` and ``log`` follow :mod:`torch_bf16.rules.arithmetic` step by step; it explains
why. A literal next to an fp64 number is fp64; alone it would be fp32, hence ``_f64``.
"""

# Device code is Triton's language, which a type checker takes for Python.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import functools
import math
from typing import Any

import triton
import triton.language as tl

from torch_bf16.rules import Rule, arithmetic, lift

from . import ieee

__all__ = ["lift_factor", "lift_scalars", "lift_statistic", "lift_update"]

LOG2_E = tl.constexpr(arithmetic.LOG2_E)
LN2_HI, LN2_LO = tl.constexpr(arithmetic.LN2_HI), tl.constexpr(arithmetic.LN2_LO)
SQRT2 = tl.constexpr(arithmetic.SQRT2)
TO_WHOLE = tl.constexpr(arithmetic.TO_WHOLE)
INF, NAN = tl.constexpr(math.inf), tl.constexpr(math.nan)


@triton.jit
def _sqrt32(x):
    return ieee.sqrt(x, False)


@triton.jit
def _div32(a, b):
    return ieee.div(a, b, False)


@triton.jit
def _sqrt32_together(x):
    return ieee.sqrt(x, True)


@triton.jit
def _div32_together(a, b):
    return ieee.div(a, b, True)


@triton.jit
def _maximum(a, b):
    return tl.where(a > b, a, tl.where(b >= a, b, a + b))


@triton.jit
def _minimum(a, b):
    return tl.where(a < b, a, tl.where(b <= a, b, a + b))


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x - x))


@triton.jit
def _f64(x):
    return tl.full((), x, tl.float64)


@triton.jit
def _sqrt(x):
    # Only the fp32 root is approximate.
    return tl.sqrt(_f64(x))


@triton.jit
def _div(a, b):
    return _f64(a) / _f64(b)


@triton.jit
def _where(condition, a, b):
    return tl.where(condition, _f64(a), _f64(b))


@triton.jit
def _power(base, exponent):
    base = _f64(base)
    result = _f64(1.0)
    left = tl.full((), exponent, tl.int64)
    while left > 0:
        result = tl.where(left % 2 == 1, result * base, result)
        base = base * base
        left = left // 2
    return result


@triton.jit
def _exp(x):
    x = _f64(x)
    k = (x * LOG2_E + TO_WHOLE) - TO_WHOLE
    r = (x - k * LN2_HI) - k * LN2_LO
    y = _f64(1.0)
    for i in tl.static_range(13, 0, -1):
        y = 1.0 + y * r / i
    for j in tl.static_range(10):
        y = tl.where(k >= (512 >> j), y * 2.0 ** (512 >> j), y)
        k = tl.where(k >= (512 >> j), k - (512 >> j), k)
        y = tl.where(k <= -(512 >> j), y * 2.0 ** -(512 >> j), y)
        k = tl.where(k <= -(512 >> j), k + (512 >> j), k)
    return tl.where(x > 709.0, _f64(INF), tl.where(x < -708.0, _f64(0.0), y))


@triton.jit
def _log(x):
    m = _f64(x)
    x = m
    k = _f64(0.0)
    for j in tl.static_range(10):
        large = m >= 2.0 ** (512 >> j)
        k = tl.where(large, k + (512 >> j), k)
        m = tl.where(large, m * 2.0 ** -(512 >> j), m)
        small = m < 2.0 ** (1 - (512 >> j))
        k = tl.where(small, k - (512 >> j), k)
        m = tl.where(small, m * 2.0 ** (512 >> j), m)
    k = tl.where(m > SQRT2, k + 1.0, k)
    m = tl.where(m > SQRT2, m * 0.5, m)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    y = _f64(0.0)
    for i in tl.static_range(23, 1, -2):
        y = (y + 1.0 / i) * z
    y = k * LN2_HI + (k * LN2_LO + (s + s) * (1.0 + y))
    y = tl.where(x < 0.0, _f64(NAN), y)
    return tl.where(x == 0.0, _f64(-INF), tl.where(x == INF, _f64(INF), y))


_FP32 = {
    "sqrt": _sqrt32, "div": _div32, "maximum": _maximum, "minimum": _minimum, "sign": _sign,
}  # fmt: skip
_TOGETHER = {**_FP32, "sqrt": _sqrt32_together, "div": _div32_together}
_FP64 = {
    "sqrt": _sqrt, "div": _div, "where": _where, "power": _power, "exp": _exp, "log": _log,
}  # fmt: skip


@functools.cache
def lift_update(rule: Rule, together: bool = False) -> Any:
    """Lift a rule's ``update`` to Triton, with division and square root from :mod:`.ieee`."""
    return lift(rule.update, _TOGETHER if together else _FP32, triton.jit, tl=tl)


@functools.cache
def lift_statistic(rule: Rule, together: bool = False) -> Any:
    """Lift a rule's ``statistic`` to Triton, as :func:`lift_update` does."""
    return lift(rule.statistic, _TOGETHER if together else _FP32, triton.jit, tl=tl)


@functools.cache
def lift_factor(rule: Rule) -> Any:
    """Lift a rule's ``factor`` to Triton, in fp64."""
    return lift(rule.factor, _FP64, triton.jit, tl=tl)


@functools.cache
def lift_scalars(rule: Rule) -> Any:
    """Lift a rule's ``scalars`` to Triton, in fp64."""
    return lift(rule.scalars, _FP64, triton.jit, tl=tl)
