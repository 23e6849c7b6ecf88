"""Schedule-free AdamW and SGD (Defazio et al., 2024, "The Road Less Scheduled", arXiv 2405.15682).

Three sequences: ``z`` descends, ``x`` is its weighted average, and gradients are taken in between,
at ``y = (1 - beta1) * z + beta1 * x``. During training the weight holds ``y``, and ``x``
follows from it and ``z``. As in the authors' package ``schedulefree``, with the learning rate
``lr = group_lr * min(1, t / warmup_steps)``:

    c = a_t / (a_1 + ... + a_t),  a_t = t**r * (highest lr so far)**weight_lr_power
    v = beta2 * v + (1 - beta2) * g**2
    u = g / (sqrt(v / (1 - beta2**t)) + eps) + weight_decay * y      SGD: u = g + weight_decay * y
    y = y + c * (z - y) - lr * (1 - beta1 * (1 - c)) * u
    z = z - lr * u

The rules multiply ``u`` through by ``sqrt(1 - beta2**t)``, as Adam's do. ``t`` counts the steps of
the group in ``a_t``, and those of the parameter in the bias correction. ``z`` starts at the weight.
"""

from __future__ import annotations

from . import arithmetic
from .rule import ITERATE, SECOND_MOMENT, Rule, State

__all__ = ["SCHEDULE_FREE_ADAMW", "SCHEDULE_FREE_SGD", "average_weight", "interpolation"]

_Z = State("z", ITERATE)


def _adamw(y, g, states, scalars):
    (
        grad_scale, weight_decay, beta2, one_minus_beta2, root, eps, share, size, lr, kept, start,
    ) = scalars  # fmt: skip
    z, v = states
    g = g * grad_scale
    z = z * kept + y * start
    v = v * beta2 + (g * g) * one_minus_beta2
    u = arithmetic.div(g * root, arithmetic.sqrt(v) + eps) + y * weight_decay
    return (y - (y - z) * share) - u * size, (z - u * lr, v)


def _sgd(y, g, states, scalars):
    grad_scale, weight_decay, share, size, lr, kept, start = scalars
    (z,) = states
    z = z * kept + y * start
    u = g * grad_scale + y * weight_decay
    return (y - (y - z) * share) - u * size, (z - u * lr,)


def interpolation(group):
    """The share of the average in the point where gradients are taken: ``beta1`` or momentum."""
    return float(group["betas"][0] if "betas" in group else group["momentum"])


def average_weight(group):
    """The learning rate of a group's next step, the highest so far, and the step's weight ``a_t``.

    Computed on the host, as the package does.
    """
    t = group["k"] + 1
    lr = float(group["lr"]) * (t / group["warmup_steps"] if t <= group["warmup_steps"] else 1.0)
    highest = max(lr, group["lr_max"])
    return lr, highest, t ** group["r"] * highest ** group["weight_lr_power"]


def _sgd_options(group):
    lr, _, weight = average_weight(group)
    total = group["weight_sum"] + weight
    share = weight / total if total else 0.0
    return lr, share, interpolation(group), group["weight_decay"]


def _adamw_options(group):
    return *_sgd_options(group), group["betas"][1], group["eps"]


def _sgd_scalars(options, step, grad_scale):
    lr, share, beta1, weight_decay = options
    first = step == 1
    # At the first step ``z * kept`` is 0 * -0.0, and adding -0.0 leaves a weight of -0.0 as it is.
    kept = arithmetic.where(first, beta1 * 0.0 * -1.0, 1.0)
    start = arithmetic.where(first, 1.0, 0.0)
    size = lr * (1.0 - beta1 * (1.0 - share))
    return grad_scale, weight_decay, share, size, lr, kept, start


def _adamw_scalars(options, step, grad_scale):
    lr, share, beta1, weight_decay, beta2, eps = options
    sgd = lr, share, beta1, weight_decay
    _, _, _, size, _, kept, start = _sgd_scalars(sgd, step, grad_scale)
    root = arithmetic.sqrt(1.0 - arithmetic.power(beta2, step))
    return (
        grad_scale, weight_decay, beta2, 1.0 - beta2, root, eps * root, share, size, lr, kept,
        start,
    )  # fmt: skip


SCHEDULE_FREE_ADAMW = Rule(
    "schedule_free_adamw",
    (_Z, State("exp_avg_sq", SECOND_MOMENT)),
    _adamw,
    _adamw_options,
    _adamw_scalars,
)
SCHEDULE_FREE_SGD = Rule("schedule_free_sgd", (_Z,), _sgd, _sgd_options, _sgd_scalars)
