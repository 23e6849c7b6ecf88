"""RAdam (Liu et al., 2020, "On the Variance of the Adaptive Learning Rate and Beyond").

With ``c1 = 1 - beta1**t``, ``c2 = 1 - beta2**t``, ``rho_max = 2 / (1 - beta2) - 1`` and
``rho = rho_max - 2 * t * beta2**t / c2``:

    g = g + weight_decay * w, or w = w * (1 - lr * weight_decay) if the decay is decoupled
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    w = w - lr * m / c1 * r * sqrt(c2) / (sqrt(v) + eps)   once rho > 5
    w = w - lr * m / c1                                    in the steps before that
    r = sqrt((rho - 4) * (rho - 2) * rho_max / ((rho_max - 4) * (rho_max - 2) * rho))

The scalars alone decide which of the two updates a step takes.
"""

from __future__ import annotations

from . import arithmetic
from .adam import ADAM, moments
from .rule import Rule
from .weight_decay import either_decay

__all__ = ["RADAM"]


def _radam(w, g, states, scalars):
    (
        grad_scale, decay, weight_decay, beta2, one_minus_beta1, one_minus_beta2,
        step_size, root_size, eps,
    ) = scalars  # fmt: skip
    m, v = states
    g = g * grad_scale + w * weight_decay
    m, v = moments(g, m, v, beta2, one_minus_beta1, one_minus_beta2)
    w = w * decay - arithmetic.div(m * step_size, arithmetic.sqrt(v) * root_size + eps)
    return w, (m, v)


def _options(group):
    beta1, beta2 = group["betas"]
    return group["lr"], beta1, beta2, group["eps"], *either_decay(group)


def _scalars(options, step, grad_scale):
    lr, beta1, beta2, eps, decoupled, weight_decay = options
    power = arithmetic.power(beta2, step)
    rho_max = arithmetic.div(2.0, 1.0 - beta2) - 1.0
    rho = rho_max - arithmetic.div(step * power * 2.0, 1.0 - power)
    adapts = rho > 5.0
    # Both branches are computed, so the one that is not taken must be a number, too.
    rho = arithmetic.where(adapts, rho, 6.0)
    rho_max = arithmetic.where(adapts, rho_max, 6.0)
    ratio = arithmetic.div(
        (rho - 4.0) * (rho - 2.0) * rho_max, (rho_max - 4.0) * (rho_max - 2.0) * rho
    )
    plain = arithmetic.div(lr, 1.0 - arithmetic.power(beta1, step))
    step_size = arithmetic.where(adapts, plain * arithmetic.sqrt(ratio * (1.0 - power)), plain)
    root_size, eps = arithmetic.where(adapts, 1.0, 0.0), arithmetic.where(adapts, eps, 1.0)
    return (
        grad_scale, 1.0 - lr * decoupled, weight_decay, beta2, 1.0 - beta1, 1.0 - beta2,
        step_size, root_size, eps,
    )  # fmt: skip


RADAM = Rule("radam", ADAM.states, _radam, _options, _scalars)
