"""Cautious AdamW and Lion (Liang et al., 2024, "Cautious Optimizers", arXiv 2411.16085).

Where an update ``u`` and the gradient differ in sign, the update is left out, and the remaining
updates of the tensor grow in proportion. As in the authors' code, and timm's:

    mask = 1 where u * g > 0, else 0
    w = w * (1 - lr * weight_decay) - lr * u * mask / max(mean(mask), 0.001)

In AdamW the sign of ``u`` is that of ``m``, in Lion that of ``beta1 * m + (1 - beta1) * g``. Signs
are compared, because the product of two small numbers would vanish. Momenta and the decay ignore
the mask.
"""

from __future__ import annotations

from . import arithmetic
from .adam import ADAMW, moments
from .lion import LION
from .rule import Rule

__all__ = ["CAUTIOUS_ADAMW", "CAUTIOUS_LION"]


def _agreement(u, g):
    """1 if two numbers have the same sign, else 0; NaN if one of them is NaN."""
    sign = arithmetic.sign(u) * arithmetic.sign(g)
    return arithmetic.maximum(sign, sign - sign)


def _adamw_agreement(w, g, states, scalars):
    grad_scale, _, beta2, one_minus_beta1, one_minus_beta2, _, _ = scalars
    m, v = states
    g = g * grad_scale
    m, _ = moments(g, m, v, beta2, one_minus_beta1, one_minus_beta2)
    return _agreement(m, g)


def _adamw(w, g, states, scalars):
    grad_scale, decay, beta2, one_minus_beta1, one_minus_beta2, step_size, eps, factor = scalars
    m, v = states
    g = g * grad_scale
    m, v = moments(g, m, v, beta2, one_minus_beta1, one_minus_beta2)
    u = arithmetic.div(m * step_size, arithmetic.sqrt(v) + eps)
    return w * decay - u * (_agreement(m, g) * factor), (m, v)


def _lion_agreement(w, g, states, scalars):
    grad_scale, _, one_minus_beta1, _, _ = scalars
    (m,) = states
    g = g * grad_scale
    return _agreement(m + (g - m) * one_minus_beta1, g)


def _lion(w, g, states, scalars):
    grad_scale, decay, one_minus_beta1, one_minus_beta2, lr, factor = scalars
    (m,) = states
    g = g * grad_scale
    c = m + (g - m) * one_minus_beta1
    m = m + (g - m) * one_minus_beta2
    # c - c is zero, and NaN for an infinite c.
    u = (arithmetic.sign(c) + (c - c)) * lr
    return w * decay - u * (_agreement(c, g) * factor), (m,)


def _factor(mean):
    # mean * 0.0 makes this float64 on a device, too, where a literal alone is fp32.
    least = mean * 0.0 + 1e-3
    return arithmetic.div(1.0, arithmetic.where(mean > least, mean, least))


CAUTIOUS_ADAMW = Rule(
    "cautious_adamw", ADAMW.states, _adamw, ADAMW.options, ADAMW.scalars,
    statistic=_adamw_agreement, factor=_factor,
)  # fmt: skip
CAUTIOUS_LION = Rule(
    "cautious_lion", LION.states, _lion, LION.options, LION.scalars,
    statistic=_lion_agreement, factor=_factor,
)  # fmt: skip
