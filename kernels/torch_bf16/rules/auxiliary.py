"""Rules that belong to no optimizer: sums of micro-batches, running averages, and plain encoding.

accumulate          w = w + g
average             w = w + (g - w) * rate     Muon's momentum, and averages of weights
store               w = g                      numbers that were computed elsewhere
"""

from __future__ import annotations

from .rule import FIRST_MOMENT, GRADIENT, Rule

__all__ = ["ACCUMULATE", "AVERAGE", "STORE"]


def _accumulate(w, g, states, scalars):
    (scale,) = scalars
    return w + g * scale, states


def _average(w, g, states, scalars):
    grad_scale, rate = scalars
    return w + (g * grad_scale - w) * rate, states


def _store(w, g, states, scalars):
    (grad_scale,) = scalars
    return g * grad_scale, states


def _no_options(group):
    return ()


def _scale_alone(options, step, grad_scale):
    return (grad_scale,)


def _average_options(group):
    return (group["rate"],)


def _average_scalars(options, step, grad_scale):
    (rate,) = options
    return grad_scale, rate


ACCUMULATE = Rule("accumulate", (), _accumulate, _no_options, _scale_alone, GRADIENT)
AVERAGE = Rule("average", (), _average, _average_options, _average_scalars, FIRST_MOMENT)
STORE = Rule("store", (), _store, _no_options, _scale_alone)
