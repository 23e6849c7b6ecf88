"""No update at all: a number that something else has computed is stored as the weight."""

from __future__ import annotations

from .rule import Rule

__all__ = ["STORE"]


def _store(w, g, states, scalars):
    (grad_scale,) = scalars
    return g * grad_scale, states


def _store_options(group):
    return ()


def _store_scalars(options, step, grad_scale):
    return (grad_scale,)


STORE = Rule("store", (), _store, _store_options, _store_scalars)
"""The weight becomes the gradient; with a scale of 1, that is how fp32 numbers are encoded."""
