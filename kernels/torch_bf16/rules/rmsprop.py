"""RMSprop (Tieleman & Hinton, 2012; centered: Graves, 2013), as torch defines it.

    g = g + weight_decay * w
    v = alpha * v + (1 - alpha) * g**2
    a = alpha * a + (1 - alpha) * g          if centered
    s = sqrt(v), or sqrt(max(v - a**2, 0)) if centered
    b = momentum * b + g / (s + eps)         with momentum
    w = w - lr * b, or w = w - lr * g / (s + eps) without

If centered, ``v`` and ``a`` are fp32 in every recipe: the rule needs their difference, and if both
were only right to 0.4 %, it would be noise as soon as a gradient is steady. torch leaves out the
``max(..., 0)`` and gives NaN where fp32 rounding makes the difference negative.
"""

from __future__ import annotations

from operator import itemgetter

from . import arithmetic
from .rule import EXACT, FIRST_MOMENT, SECOND_MOMENT, Rule, State

__all__ = ["RMSPROP", "RMSPROP_CENTERED", "RMSPROP_CENTERED_MOMENTUM", "RMSPROP_MOMENTUM"]

_PLAIN = (State("square_avg", SECOND_MOMENT),)
_CENTERED = (State("square_avg", EXACT), State("grad_avg", EXACT))
_MOMENTUM = (State("momentum_buffer", FIRST_MOMENT, optional=True),)


def _rmsprop(w, g, states, scalars):
    grad_scale, weight_decay, lr, alpha, one_minus_alpha, eps, _ = scalars
    (v,) = states
    g = g * grad_scale + w * weight_decay
    v = v * alpha + (g * g) * one_minus_alpha
    return w - arithmetic.div(g * lr, arithmetic.sqrt(v) + eps), (v,)


def _momentum(w, g, states, scalars):
    grad_scale, weight_decay, lr, alpha, one_minus_alpha, eps, momentum = scalars
    v, b = states
    g = g * grad_scale + w * weight_decay
    v = v * alpha + (g * g) * one_minus_alpha
    b = b * momentum + arithmetic.div(g, arithmetic.sqrt(v) + eps)
    return w - b * lr, (v, b)


def _variance(g, v, a, alpha, one_minus_alpha):
    """Both averages, one step on, and the variance computed from them."""
    v = v * alpha + (g * g) * one_minus_alpha
    a = a + (g - a) * one_minus_alpha
    # v - v is zero, and NaN for an infinite v, so that an infinite gradient is not hidden.
    return v, a, arithmetic.maximum(v - a * a, v - v)


def _centered(w, g, states, scalars):
    grad_scale, weight_decay, lr, alpha, one_minus_alpha, eps, _ = scalars
    v, a = states
    g = g * grad_scale + w * weight_decay
    v, a, variance = _variance(g, v, a, alpha, one_minus_alpha)
    return w - arithmetic.div(g * lr, arithmetic.sqrt(variance) + eps), (v, a)


def _centered_momentum(w, g, states, scalars):
    grad_scale, weight_decay, lr, alpha, one_minus_alpha, eps, momentum = scalars
    v, a, b = states
    g = g * grad_scale + w * weight_decay
    v, a, variance = _variance(g, v, a, alpha, one_minus_alpha)
    b = b * momentum + arithmetic.div(g, arithmetic.sqrt(variance) + eps)
    return w - b * lr, (v, a, b)


_options = itemgetter("lr", "alpha", "eps", "weight_decay", "momentum")


def _scalars(options, step, grad_scale):
    lr, alpha, eps, weight_decay, momentum = options
    return grad_scale, weight_decay, lr, alpha, 1.0 - alpha, eps, momentum


RMSPROP = Rule("rmsprop", _PLAIN, _rmsprop, _options, _scalars)
RMSPROP_MOMENTUM = Rule("rmsprop_momentum", (*_PLAIN, *_MOMENTUM), _momentum, _options, _scalars)
RMSPROP_CENTERED = Rule("rmsprop_centered", _CENTERED, _centered, _options, _scalars)
RMSPROP_CENTERED_MOMENTUM = Rule(
    "rmsprop_centered_momentum", (*_CENTERED, *_MOMENTUM), _centered_momentum, _options, _scalars
)
