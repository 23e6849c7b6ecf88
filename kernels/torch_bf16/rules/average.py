"""A running average: the number itself moves towards what it is given.

    w = w + (g - w) * rate

Muon's momentum and the average of weights are stepped by it, as ``w``.
"""

from __future__ import annotations

from .rule import FIRST_MOMENT, Rule

__all__ = ["AVERAGE"]


def _average(w, g, states, scalars):
    grad_scale, rate = scalars
    g = g * grad_scale
    return w + (g - w) * rate, states


def _options(group):
    return (group["rate"],)


def _scalars(options, step, grad_scale):
    (rate,) = options
    return grad_scale, rate


AVERAGE = Rule("average", (), _average, _options, _scalars, FIRST_MOMENT)
