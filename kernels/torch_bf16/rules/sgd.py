"""Stochastic gradient descent, with momentum and Nesterov's variant as torch defines them."""

from __future__ import annotations

from operator import itemgetter

from . import arithmetic
from .rule import FIRST_MOMENT, Rule, State

__all__ = ["SGD", "SGD_MOMENTUM", "SGD_NESTEROV"]

_MOMENTUM = (State("momentum_buffer", FIRST_MOMENT, optional=True),)


def _sgd(w, g, states, scalars):
    grad_scale, weight_decay, lr = scalars
    g = g * grad_scale + w * weight_decay
    return w - g * lr, states


def _sgd_momentum(w, g, states, scalars):
    grad_scale, weight_decay, lr, kept, one_minus_dampening, _ = scalars
    (b,) = states
    g = g * grad_scale + w * weight_decay
    b = b * kept + g * one_minus_dampening
    return w - b * lr, (b,)


def _sgd_nesterov(w, g, states, scalars):
    grad_scale, weight_decay, lr, kept, one_minus_dampening, momentum = scalars
    (b,) = states
    g = g * grad_scale + w * weight_decay
    b = b * kept + g * one_minus_dampening
    return w - (g + b * momentum) * lr, (b,)


_options = itemgetter("lr", "weight_decay")
_momentum_options = itemgetter("lr", "weight_decay", "momentum", "dampening")


def _scalars(options, step, grad_scale):
    lr, weight_decay = options
    return grad_scale, weight_decay, lr


def _momentum_scalars(options, step, grad_scale):
    lr, weight_decay, momentum, dampening = options
    # torch starts the buffer as a copy of the first gradient, undamped.
    kept = arithmetic.where(step == 1, 0.0, momentum)
    one_minus_dampening = arithmetic.where(step == 1, 1.0, 1.0 - dampening)
    return grad_scale, weight_decay, lr, kept, one_minus_dampening, momentum


SGD = Rule("sgd", (), _sgd, _options, _scalars)
SGD_MOMENTUM = Rule("sgd_momentum", _MOMENTUM, _sgd_momentum, _momentum_options, _momentum_scalars)
SGD_NESTEROV = Rule("sgd_nesterov", _MOMENTUM, _sgd_nesterov, _momentum_options, _momentum_scalars)
