"""The elementwise part of rules that first need a whole matrix.

    w = w * (1 - lr * weight_decay) - size * g

In place of the gradient, ``g`` is the direction that :mod:`torch_bf16.optim.muon` or
:mod:`torch_bf16.optim.adafactor` computes from it, with clipping and ``maximize`` applied.
"""

from __future__ import annotations

from .rule import EXACT, FIRST_MOMENT, Rule, State
from .weight_decay import decay_per_lr

__all__ = ["ADAFACTOR", "ADAFACTOR_VECTOR", "MUON"]


def _descent(w, g, states, scalars):
    decay, size = scalars
    return w * decay - g * size, states


def _options(group):
    return group["lr"], decay_per_lr(group)


def _muon_scalars(options, step, grad_scale):
    lr, weight_decay = options
    return 1.0 - lr * weight_decay, lr


def _adafactor_scalars(options, step, grad_scale):
    lr, weight_decay = options
    return 1.0 - lr * weight_decay, 1.0


def _rows(shape):
    return (*shape[:-1], 1)


def _columns(shape):
    return (*shape[:-2], 1, shape[-1])


_MOMENTUM = (State("momentum_buffer", FIRST_MOMENT, optional=True),)
_FACTORS = (State("row_var", EXACT, shape=_rows), State("col_var", EXACT, shape=_columns))
_VARIANCE = (State("variance", EXACT),)

MUON = Rule("muon", (), _descent, _options, _muon_scalars, stage_states=_MOMENTUM, stage_dims=2)
ADAFACTOR = Rule("adafactor", (), _descent, _options, _adafactor_scalars, stage_states=_FACTORS)
ADAFACTOR_VECTOR = Rule(
    "adafactor_vector", (), _descent, _options, _adafactor_scalars, stage_states=_VARIANCE
)
