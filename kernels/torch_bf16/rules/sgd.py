"""Stochastic gradient descent, with momentum and Nesterov's variant as torch defines them."""

from __future__ import annotations

from .rule import FIRST_MOMENT, Rule, State

__all__ = ["SGD", "SGD_MOMENTUM", "SGD_NESTEROV"]

_MOMENTUM = (State("momentum_buffer", FIRST_MOMENT),)


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


def _sgd_scalars(group, step, grad_scale):
    return grad_scale, float(group["weight_decay"]), float(group["lr"])


def _momentum_scalars(group, step, grad_scale):
    # torch starts the buffer as a copy of the first gradient, undamped.
    first = step == 1
    momentum = 0.0 if first else float(group["momentum"])
    one_minus_dampening = 1.0 if first else 1.0 - float(group["dampening"])
    return *_sgd_scalars(group, step, grad_scale), momentum, one_minus_dampening


def _nesterov_scalars(group, step, grad_scale):
    return *_momentum_scalars(group, step, grad_scale), float(group["momentum"])


SGD = Rule("sgd", (), _sgd, _sgd_scalars)
SGD_MOMENTUM = Rule("sgd_momentum", _MOMENTUM, _sgd_momentum, _momentum_scalars)
SGD_NESTEROV = Rule("sgd_nesterov", _MOMENTUM, _sgd_nesterov, _nesterov_scalars)
