"""Lion (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms").

    c = beta1 * m + (1 - beta1) * g
    w = w * (1 - lr * weight_decay) - lr * sign(c)
    m = beta2 * m + (1 - beta2) * g

An infinite momentum has a sign, so it would move the weight by ``lr`` in every step; here it makes
the weight NaN, as it would in any other rule.
"""

from __future__ import annotations

from . import arithmetic
from .rule import FIRST_MOMENT, Rule, State
from .weight_decay import decay_per_lr

__all__ = ["LION"]


def _lion(w, g, states, scalars):
    grad_scale, decay, one_minus_beta1, one_minus_beta2, lr = scalars
    (m,) = states
    g = g * grad_scale
    c = m + (g - m) * one_minus_beta1
    m = m + (g - m) * one_minus_beta2
    # c - c is zero, and NaN for an infinite c.
    w = w * decay - (arithmetic.sign(c) + (c - c)) * lr
    return w, (m,)


def _options(group):
    beta1, beta2 = group["betas"]
    return group["lr"], beta1, beta2, decay_per_lr(group)


def _scalars(options, step, grad_scale):
    lr, beta1, beta2, weight_decay = options
    return grad_scale, 1.0 - lr * weight_decay, 1.0 - beta1, 1.0 - beta2, lr


LION = Rule("lion", (State("exp_avg", FIRST_MOMENT),), _lion, _options, _scalars)
