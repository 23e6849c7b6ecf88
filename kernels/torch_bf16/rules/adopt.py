"""ADOPT (Taniguchi et al., 2024, "ADOPT: Modified Adam Can Converge with Any beta2").

    v = g**2 at the first step, which changes nothing else; then, with t counting from 0:

    g = g + weight_decay * w, or w = w * (1 - lr * weight_decay) if the decay is decoupled
    m = beta1 * m + (1 - beta1) * clip(g / max(sqrt(v), eps), t**0.25)
    w = w - lr * m
    v = beta2 * v + (1 - beta2) * g**2

A gradient is divided by the second moment of the steps before it, so its own share in ``v`` does
not damp it, and there is no bias to correct. Clipping lets infinite gradients through.
"""

from __future__ import annotations

from . import arithmetic
from .adam import ADAM
from .rule import Rule
from .weight_decay import either_decay

__all__ = ["ADOPT"]


def _adopt(w, g, states, scalars):
    (
        grad_scale, decay, weight_decay, beta2, one_minus_beta1, one_minus_beta2, lr, eps, clip,
        minus_clip,
    ) = scalars  # fmt: skip
    m, v = states
    g = g * grad_scale + w * weight_decay
    u = arithmetic.div(g, arithmetic.maximum(arithmetic.sqrt(v), eps))
    # g - g is zero, and NaN for an infinite g, which clipping would hide.
    u = arithmetic.minimum(arithmetic.maximum(u, minus_clip), clip) + (g - g)
    m = m + (u - m) * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    return w * decay - m * lr, (m, v)


def _options(group):
    beta1, beta2 = group["betas"]
    clipped = 1.0 if group["clip"] else 0.0
    return group["lr"], beta1, beta2, group["eps"], clipped, *either_decay(group)


def _scalars(options, step, grad_scale):
    lr, beta1, beta2, eps, clipped, decoupled, weight_decay = options
    # beta2 * 0.0 makes this float64 on a device, too, where the step is an integer.
    before = step + beta2 * 0.0 - 1.0
    # The largest fp32 number if nothing is to be clipped.
    quartic = arithmetic.sqrt(arithmetic.sqrt(before))
    clip = arithmetic.where(clipped > 0.0, quartic, 3.4028234663852886e38)
    lr = arithmetic.where(step == 1, 0.0, lr)
    one_minus_beta1 = arithmetic.where(step == 1, 0.0, 1.0 - beta1)
    one_minus_beta2 = arithmetic.where(step == 1, 1.0, 1.0 - beta2)
    beta2 = arithmetic.where(step == 1, 0.0, beta2)
    decay = 1.0 - lr * decoupled
    return (
        grad_scale, decay, weight_decay, beta2, one_minus_beta1, one_minus_beta2, lr, eps, clip,
        clip * -1.0,
    )  # fmt: skip


ADOPT = Rule("adopt", ADAM.states, _adopt, _options, _scalars)
