"""Stochastic gradient descent, with momentum and Nesterov's variant as torch defines them."""

from __future__ import annotations

from . import arithmetic
from .rule import FIRST_MOMENT, Rule, State

__all__ = ["SGD", "SGD_MOMENTUM", "SGD_NESTEROV"]

_MOMENTUM = (State("momentum_buffer", FIRST_MOMENT, optional=True),)


def _sgd(w, g, states, scalars):
    grad_scale, weight_decay, lr = scalars
    g = g * grad_scale
    g = g + w * weight_decay
    return w - g * lr, states


def _sgd_momentum(w, g, states, scalars):
    grad_scale, weight_decay, lr, momentum, one_minus_dampening = scalars
    (b,) = states
    g = g * grad_scale
    g = g + w * weight_decay
    b = b * momentum + g * one_minus_dampening
    return w - b * lr, (b,)


def _sgd_nesterov(w, g, states, scalars):
    grad_scale, weight_decay, lr, momentum, one_minus_dampening, lookahead = scalars
    (b,) = states
    g = g * grad_scale
    g = g + w * weight_decay
    b = b * momentum + g * one_minus_dampening
    d = g + b * lookahead
    return w - d * lr, (b,)


def _sgd_options(group):
    return group["lr"], group["weight_decay"]


def _momentum_options(group):
    return group["lr"], group["weight_decay"], group["momentum"], group["dampening"]


def _sgd_scalars(options, step, grad_scale):
    lr, weight_decay = options
    return grad_scale, weight_decay, lr


def _momentum_scalars(options, step, grad_scale):
    lr, weight_decay, momentum, dampening = options
    # torch starts the buffer as a copy of the first gradient, undamped.
    first_momentum = arithmetic.where(step == 1, 0.0, momentum)
    one_minus_dampening = arithmetic.where(step == 1, 1.0, 1.0 - dampening)
    return grad_scale, weight_decay, lr, first_momentum, one_minus_dampening


def _nesterov_scalars(options, step, grad_scale):
    _, _, lookahead, _ = options
    grad_scale, weight_decay, lr, momentum, one_minus_dampening = _momentum_scalars(
        options, step, grad_scale
    )
    return grad_scale, weight_decay, lr, momentum, one_minus_dampening, lookahead


SGD = Rule("sgd", (), _sgd, _sgd_options, _sgd_scalars)
SGD_MOMENTUM = Rule("sgd_momentum", _MOMENTUM, _sgd_momentum, _momentum_options, _momentum_scalars)
SGD_NESTEROV = Rule("sgd_nesterov", _MOMENTUM, _sgd_nesterov, _momentum_options, _nesterov_scalars)
