"""AdamW with update clipping (StableAdamW: Wortsman et al., 2023, arXiv 2304.13013, algorithm 2).

Adafactor's clipping for AdamW: if gradients outgrow the second moment, which lags behind them, the
learning rate of the whole tensor shrinks for this step. With ``v`` corrected for its bias, as the
paper does by its ``beta2`` of each step,

    RMS = sqrt(mean(g**2 / max(v, eps**2)))
    lr = lr / max(1, RMS)
    w = w * (1 - lr * weight_decay) - lr * m / (sqrt(v) + eps)

so the decay is clipped, too, as in the paper, torch-optimi and pytorch-optimizer.
"""

from __future__ import annotations

from . import arithmetic
from .adam import ADAMW, adam_scalars, moments
from .rule import Rule

__all__ = ["STABLE_ADAMW"]


def _square_ratio(w, g, states, scalars):
    grad_scale, _, beta2, one_minus_beta1, one_minus_beta2, _, eps, root = scalars
    m, v = states
    g = g * grad_scale
    _, v = moments(g, m, v, beta2, one_minus_beta1, one_minus_beta2)
    ratio = arithmetic.div(g * root, arithmetic.maximum(arithmetic.sqrt(v), eps))
    return ratio * ratio


def _stable_adamw(w, g, states, scalars):
    grad_scale, penalty, beta2, one_minus_beta1, one_minus_beta2, step_size, eps, _, factor = (
        scalars
    )
    m, v = states
    m, v = moments(g * grad_scale, m, v, beta2, one_minus_beta1, one_minus_beta2)
    u = arithmetic.div(m * step_size, arithmetic.sqrt(v) + eps)
    return w - (w * penalty + u) * factor, (m, v)


def _scalars(options, step, grad_scale):
    lr, beta1, beta2, eps, weight_decay = options
    grad_scale, penalty, beta2, one_minus_beta1, one_minus_beta2, step_size, eps = adam_scalars(
        (lr, beta1, beta2, eps, lr * weight_decay), step, grad_scale
    )
    root = arithmetic.sqrt(1.0 - arithmetic.power(beta2, step))
    return grad_scale, penalty, beta2, one_minus_beta1, one_minus_beta2, step_size, eps, root


def _factor(mean):
    return arithmetic.div(1.0, arithmetic.sqrt(arithmetic.where(mean > 1.0, mean, 1.0)))


STABLE_ADAMW = Rule(
    "stable_adamw", ADAMW.states, _stable_adamw, ADAMW.options, _scalars,
    statistic=_square_ratio, factor=_factor,
)  # fmt: skip
