"""NAdam (Dozat, 2016, "Incorporating Nesterov Momentum into Adam"), as torch defines it.

With ``mu_t = beta1 * (1 - 0.96**(t * momentum_decay) / 2)``, its product ``P_t`` over all steps up
to t, and ``c2 = 1 - beta2**t``:

    g = g + weight_decay * w, or w = w * (1 - lr * weight_decay) if the decay is decoupled
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    w = w - lr * (g * (1 - mu_t) / (1 - P_t) + m * mu_{t+1} / (1 - P_t * mu_{t+1}))
          / (sqrt(v / c2) + eps)

torch keeps ``P_t`` as a state, in fp32. Here it is computed from the step: with ``q =
0.96**momentum_decay`` its logarithm is ``t * log(beta1)`` plus the sum of ``log(1 - q**i / 2)``,
and expanding that logarithm in powers of ``q**i / 2`` turns the sum over steps into one of
geometric series, of which the first 32 are more than enough for fp32. A beta1 that changes during
training therefore counts as if it had always had its present value.
"""

from __future__ import annotations

from . import arithmetic
from .adam import ADAM, moments
from .rule import Rule
from .weight_decay import either_decay

__all__ = ["NADAM", "mu_product"]


def _nadam(w, g, states, scalars):
    (
        grad_scale, decay, weight_decay, beta2, one_minus_beta1, one_minus_beta2,
        gradient_size, momentum_size, eps,
    ) = scalars  # fmt: skip
    m, v = states
    g = g * grad_scale + w * weight_decay
    m, v = moments(g, m, v, beta2, one_minus_beta1, one_minus_beta2)
    step = g * gradient_size + m * momentum_size
    return w * decay - arithmetic.div(step, arithmetic.sqrt(v) + eps), (m, v)


def _log_decay(exponent):
    """``log(0.96**exponent)``."""
    return exponent * -0.040821994520255166


def mu_product(beta1, momentum_decay, step):
    """``P_t``: the product of ``mu`` over steps 1 to ``step``, in float64."""
    log_q = _log_decay(momentum_decay)
    q, q_t = arithmetic.exp(log_q), arithmetic.exp(log_q * step)
    # log_q * 0.0 is float64 on a device, too, where literals are fp32 and the step is an integer.
    k, total = log_q * 0.0, log_q * 0.0
    share, q_k, q_kt = k + 1.0, k + 1.0, k + 1.0
    for _ in range(32):
        k, share, q_k, q_kt = k + 1.0, share * 0.5, q_k * q, q_kt * q_t
        # The sum of q**(k * i) over the steps; for q near 1 the closed form loses all digits.
        x = -k * log_q
        steep = x >= 1e-6
        closed = arithmetic.div(q_k * (1.0 - q_kt), arithmetic.where(steep, 1.0 - q_k, 1.0))
        flat = arithmetic.div(k * 0.0 + step, 1.0 + (x * step + x) * 0.5)
        total = total + arithmetic.div(share, k) * arithmetic.where(steep, closed, flat)
    return arithmetic.power(beta1, step) * arithmetic.exp(-total)


def _options(group):
    beta1, beta2 = group["betas"]
    own = group["lr"], beta1, beta2, group["eps"], group["momentum_decay"]
    return *own, *either_decay(group)


def _mu(beta1, exponent):
    return beta1 * (1.0 - 0.5 * arithmetic.exp(_log_decay(exponent)))


def _scalars(options, step, grad_scale):
    lr, beta1, beta2, eps, momentum_decay, decoupled, weight_decay = options
    exponent = momentum_decay * step
    mu, mu_next = _mu(beta1, exponent), _mu(beta1, exponent + momentum_decay)
    product = mu_product(beta1, momentum_decay, step)
    root = arithmetic.sqrt(1.0 - arithmetic.power(beta2, step))
    gradient_size = arithmetic.div(lr * root * (1.0 - mu), 1.0 - product)
    momentum_size = arithmetic.div(lr * root * mu_next, 1.0 - product * mu_next)
    return (
        grad_scale, 1.0 - lr * decoupled, weight_decay, beta2, 1.0 - beta1, 1.0 - beta2,
        gradient_size, momentum_size, eps * root,
    )  # fmt: skip


NADAM = Rule("nadam", ADAM.states, _nadam, _options, _scalars)
