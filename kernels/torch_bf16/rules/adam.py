"""Adam and AdamW (Kingma & Ba, 2015; Loshchilov & Hutter, 2019).

With bias corrections ``c1 = 1 - beta1**t`` and ``c2 = 1 - beta2**t``, torch computes
``w -= lr/c1 * m / (sqrt(v)/sqrt(c2) + eps)``. Both rules multiply through by ``sqrt(c2)``, which
saves a division per element: ``w -= (lr*sqrt(c2)/c1) * m / (sqrt(v) + eps*sqrt(c2))``.
"""

from __future__ import annotations

from . import arithmetic
from .rule import FIRST_MOMENT, SECOND_MOMENT, Rule, State
from .weight_decay import decay_per_lr

__all__ = ["ADAM", "ADAMW"]

_STATES = (State("exp_avg", FIRST_MOMENT), State("exp_avg_sq", SECOND_MOMENT))


def _adamw(w, g, states, scalars):
    grad_scale, decay, beta2, one_minus_beta1, one_minus_beta2, step_size, eps = scalars
    m, v = states
    g = g * grad_scale
    m = m + (g - m) * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    w = w * decay - arithmetic.div(m * step_size, arithmetic.sqrt(v) + eps)
    return w, (m, v)


def _adam(w, g, states, scalars):
    grad_scale, weight_decay, beta2, one_minus_beta1, one_minus_beta2, step_size, eps = scalars
    m, v = states
    g = g * grad_scale
    g = g + w * weight_decay
    m = m + (g - m) * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    w = w - arithmetic.div(m * step_size, arithmetic.sqrt(v) + eps)
    return w, (m, v)


def _options(group):
    beta1, beta2 = group["betas"]
    return group["lr"], beta1, beta2, group["eps"], group["weight_decay"]


def _adamw_options(group):
    beta1, beta2 = group["betas"]
    return group["lr"], beta1, beta2, group["eps"], decay_per_lr(group)


def _moment_scalars(options, step):
    lr, beta1, beta2, eps, _ = options
    correction1 = 1.0 - arithmetic.power(beta1, step)
    correction2_sqrt = arithmetic.sqrt(1.0 - arithmetic.power(beta2, step))
    step_size = arithmetic.div(lr * correction2_sqrt, correction1)
    return beta2, 1.0 - beta1, 1.0 - beta2, step_size, eps * correction2_sqrt


def _adamw_scalars(options, step, grad_scale):
    lr, _, _, _, weight_decay = options
    beta2, one_minus_beta1, one_minus_beta2, step_size, eps = _moment_scalars(options, step)
    decay = 1.0 - lr * weight_decay
    return grad_scale, decay, beta2, one_minus_beta1, one_minus_beta2, step_size, eps


def _adam_scalars(options, step, grad_scale):
    _, _, _, _, weight_decay = options
    beta2, one_minus_beta1, one_minus_beta2, step_size, eps = _moment_scalars(options, step)
    return grad_scale, weight_decay, beta2, one_minus_beta1, one_minus_beta2, step_size, eps


ADAMW = Rule("adamw", _STATES, _adamw, _adamw_options, _adamw_scalars)
ADAM = Rule("adam", _STATES, _adam, _options, _adam_scalars)
