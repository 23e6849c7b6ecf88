"""Adam and AdamW (Kingma & Ba, 2015; Loshchilov & Hutter, 2019), and AMSGrad (Reddi et al., 2018).

With bias corrections ``c1 = 1 - beta1**t`` and ``c2 = 1 - beta2**t``, torch computes
``w -= lr/c1 * m / (sqrt(v)/sqrt(c2) + eps)``. The rules multiply through by ``sqrt(c2)``, which
saves a division per element: ``w -= (lr*sqrt(c2)/c1) * m / (sqrt(v) + eps*sqrt(c2))``.

In AMSGrad ``v_max = max(v_max, v)`` takes the place of ``v`` there, before bias correction as in
torch. Both are rounded with the same random bits, and so ``v_max`` is the running maximum of the
stored ``v``, with no rounding of its own.
"""

from __future__ import annotations

from . import arithmetic
from .rule import FIRST_MOMENT, SECOND_MOMENT, Rule, State
from .weight_decay import decay_per_lr

__all__ = ["ADAM", "ADAMW", "ADAMW_AMSGRAD", "ADAM_AMSGRAD", "adam_scalars", "moments"]

_STATES = (State("exp_avg", FIRST_MOMENT), State("exp_avg_sq", SECOND_MOMENT))
_AMSGRAD_STATES = (*_STATES, State("max_exp_avg_sq", SECOND_MOMENT, optional=True))


def moments(g, m, v, beta2, one_minus_beta1, one_minus_beta2):
    """The running averages of gradients and of their squares, one step on."""
    return m + (g - m) * one_minus_beta1, v * beta2 + (g * g) * one_minus_beta2


def _adamw(w, g, states, scalars):
    grad_scale, decay, beta2, one_minus_beta1, one_minus_beta2, step_size, eps = scalars
    m, v = states
    m, v = moments(g * grad_scale, m, v, beta2, one_minus_beta1, one_minus_beta2)
    w = w * decay - arithmetic.div(m * step_size, arithmetic.sqrt(v) + eps)
    return w, (m, v)


def _adam(w, g, states, scalars):
    grad_scale, weight_decay, beta2, one_minus_beta1, one_minus_beta2, step_size, eps = scalars
    m, v = states
    g = g * grad_scale + w * weight_decay
    m, v = moments(g, m, v, beta2, one_minus_beta1, one_minus_beta2)
    w = w - arithmetic.div(m * step_size, arithmetic.sqrt(v) + eps)
    return w, (m, v)


def _adamw_amsgrad(w, g, states, scalars):
    grad_scale, decay, beta2, one_minus_beta1, one_minus_beta2, step_size, eps = scalars
    m, v, v_max = states
    m, v = moments(g * grad_scale, m, v, beta2, one_minus_beta1, one_minus_beta2)
    v_max = arithmetic.maximum(v_max, v)
    w = w * decay - arithmetic.div(m * step_size, arithmetic.sqrt(v_max) + eps)
    return w, (m, v, v_max)


def _adam_amsgrad(w, g, states, scalars):
    grad_scale, weight_decay, beta2, one_minus_beta1, one_minus_beta2, step_size, eps = scalars
    m, v, v_max = states
    g = g * grad_scale + w * weight_decay
    m, v = moments(g, m, v, beta2, one_minus_beta1, one_minus_beta2)
    v_max = arithmetic.maximum(v_max, v)
    w = w - arithmetic.div(m * step_size, arithmetic.sqrt(v_max) + eps)
    return w, (m, v, v_max)


def _adam_options(group):
    beta1, beta2 = group["betas"]
    return group["lr"], beta1, beta2, group["eps"], group["weight_decay"]


def _adamw_options(group):
    beta1, beta2 = group["betas"]
    return group["lr"], beta1, beta2, group["eps"], decay_per_lr(group)


def adam_scalars(options, step, grad_scale):
    """The scalars of Adam's rules; the last option becomes the second scalar, the decay."""
    lr, beta1, beta2, eps, decay = options
    correction1 = 1.0 - arithmetic.power(beta1, step)
    correction2_sqrt = arithmetic.sqrt(1.0 - arithmetic.power(beta2, step))
    step_size = arithmetic.div(lr * correction2_sqrt, correction1)
    eps = eps * correction2_sqrt
    return grad_scale, decay, beta2, 1.0 - beta1, 1.0 - beta2, step_size, eps


def _adamw_scalars(options, step, grad_scale):
    lr, beta1, beta2, eps, weight_decay = options
    return adam_scalars((lr, beta1, beta2, eps, 1.0 - lr * weight_decay), step, grad_scale)


ADAMW = Rule("adamw", _STATES, _adamw, _adamw_options, _adamw_scalars)
ADAM = Rule("adam", _STATES, _adam, _adam_options, adam_scalars)
ADAMW_AMSGRAD = Rule(
    "adamw_amsgrad", _AMSGRAD_STATES, _adamw_amsgrad, _adamw_options, _adamw_scalars
)
ADAM_AMSGRAD = Rule("adam_amsgrad", _AMSGRAD_STATES, _adam_amsgrad, _adam_options, adam_scalars)
