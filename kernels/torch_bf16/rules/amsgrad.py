"""AMSGrad (Reddi et al., 2018), the variant of Adam and AdamW whose second moment never falls.

    v_max = max(v_max, v), and v_max takes the place of v in the update of ``adam``.

As in torch the maximum is taken before bias correction. Both moments are rounded with the same
random bits, and so ``v_max`` is the running maximum of what is stored of ``v``, with no rounding of
its own.
"""

from __future__ import annotations

from . import arithmetic
from .adam import ADAM, ADAMW
from .rule import SECOND_MOMENT, Rule, State

__all__ = ["ADAMW_AMSGRAD", "ADAM_AMSGRAD"]

_STATES = (*ADAM.states, State("max_exp_avg_sq", SECOND_MOMENT, optional=True))


def _adamw_amsgrad(w, g, states, scalars):
    grad_scale, decay, beta2, one_minus_beta1, one_minus_beta2, step_size, eps = scalars
    m, v, v_max = states
    g = g * grad_scale
    m = m + (g - m) * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    v_max = arithmetic.maximum(v_max, v)
    w = w * decay - arithmetic.div(m * step_size, arithmetic.sqrt(v_max) + eps)
    return w, (m, v, v_max)


def _adam_amsgrad(w, g, states, scalars):
    grad_scale, weight_decay, beta2, one_minus_beta1, one_minus_beta2, step_size, eps = scalars
    m, v, v_max = states
    g = g * grad_scale
    g = g + w * weight_decay
    m = m + (g - m) * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    v_max = arithmetic.maximum(v_max, v)
    w = w - arithmetic.div(m * step_size, arithmetic.sqrt(v_max) + eps)
    return w, (m, v, v_max)


ADAMW_AMSGRAD = Rule("adamw_amsgrad", _STATES, _adamw_amsgrad, ADAMW.options, ADAMW.scalars)
ADAM_AMSGRAD = Rule("adam_amsgrad", _STATES, _adam_amsgrad, ADAM.options, ADAM.scalars)
