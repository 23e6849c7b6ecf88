"""Adagrad (Duchi et al., 2011).

    g = g + weight_decay * w
    s = s + g**2                                      starting at initial_accumulator_value
    w = w - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)

The sum grows by an ever smaller fraction of itself, so in bf16 it stalls unless it is rounded
stochastically: with nearest rounding, after 256 equal gradients.
"""

from __future__ import annotations

from operator import itemgetter

from . import arithmetic
from .rule import SECOND_MOMENT, Rule, State

__all__ = ["ADAGRAD"]


def _adagrad(w, g, states, scalars):
    grad_scale, weight_decay, lr, eps, kept, start = scalars
    (s,) = states
    g = g * grad_scale + w * weight_decay
    s = (s * kept + start) + g * g
    return w - arithmetic.div(g * lr, arithmetic.sqrt(s) + eps), (s,)


_options = itemgetter("lr", "lr_decay", "weight_decay", "eps", "initial_accumulator_value")


def _scalars(options, step, grad_scale):
    lr, lr_decay, weight_decay, eps, start = options
    first = step == 1
    lr = arithmetic.div(lr, 1.0 + (step * lr_decay - lr_decay))
    kept, start = arithmetic.where(first, 0.0, 1.0), arithmetic.where(first, start, 0.0)
    return grad_scale, weight_decay, lr, eps, kept, start


ADAGRAD = Rule("adagrad", (State("sum", SECOND_MOMENT),), _adagrad, _options, _scalars)
