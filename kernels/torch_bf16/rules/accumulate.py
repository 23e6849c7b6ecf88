"""Adding a micro-batch's gradient to those before it: what accumulation asks of a kernel."""

from __future__ import annotations

from .rule import GRADIENT, Rule

__all__ = ["ACCUMULATE"]


def _accumulate(w, g, states, scalars):
    (scale,) = scalars
    return w + g * scale, states


def _options(group):
    return ()


def _scalars(options, step, grad_scale):
    return (grad_scale,)


ACCUMULATE = Rule("accumulate", (), _accumulate, _options, _scalars, GRADIENT)
