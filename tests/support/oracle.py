"""What every backend must compute, in NumPy, written to be read and not to be fast.

It imports nothing of the project, and it words each rule otherwise than the project's code where
that is possible. bf16 numbers are uint16 arrays of their bits. ``oracle_formats.py`` says which
planes a format has.
"""

from hashlib import blake2b

import numpy as np
import oracle_rules
from oracle_formats import STOCHASTIC, bf16_stochastic, bf16_to_fp32, decode, encode

# (stream, shift): the 16 bits of a stream's word that a number is rounded with
WEIGHT, FIRST_MOMENT, SECOND_MOMENT, GRADIENT = (0, 16), (1, 16), (0, 0), (2, 16)
REDUCTION = (3, 16)


# Noise


def tensor_key(name):
    return int(np.frombuffer(blake2b(name.encode(), digest_size=8).digest(), dtype="<u8")[0])


def stream_base(seed, key, stream):
    message = (seed % 2**64).to_bytes(8, "little") + key.to_bytes(8, "little") + bytes([stream])
    digest = blake2b(message, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def mix32(x):
    """x: a Python int."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def noise_at(seed, step, key, stream, index):
    """The 32 bits of one element, in Python ints alone."""
    t0, t1 = stream_base(seed, key, stream)
    index_hi, index_lo = divmod(index, 2**32)
    block = index_hi * 0x85EBCA6B % 2**32
    k0 = mix32(((t0 ^ block) + step * 0x9E3779B9) % 2**32)
    k1 = mix32(t1 ^ k0)
    x = index_lo ^ k0
    x ^= x >> 17
    x = x * 0xED5AD4BB % 2**32
    x ^= x >> 11
    x = (x + k1) % 2**32
    x = x * 0xAC4C1B51 % 2**32
    x ^= x >> 15
    x = x * 0x31848BAB % 2**32
    return x ^ x >> 16


def noise(seed, step, key, stream, start, n):
    """uint32 [n]: `noise_at` for start .. start + n - 1, in uint64 arrays reduced after each op."""
    return noise_from(stream_base(seed, key, stream), step, start, n)


def noise_from(base, step, start, n):
    """`noise` of a stream that starts from other words than its own."""
    return noise_of(base, step, np.uint64(start) + np.arange(n, dtype=np.uint64))


def noise_of(base, step, indices):
    """uint32: `noise_from` for these uint64 indices."""
    modulus = np.uint64(2**32)
    t0, t1 = base
    high, x = np.divmod(indices, modulus)
    k1 = np.empty_like(x)
    for index_hi in np.unique(high):
        here = high == index_hi
        k0 = mix32(((t0 ^ (int(index_hi) * 0x85EBCA6B % 2**32)) + step * 0x9E3779B9) % 2**32)
        x[here] ^= np.uint64(k0)
        k1[here] = mix32(t1 ^ k0)
    x ^= x >> np.uint64(17)
    x = x * np.uint64(0xED5AD4BB) % modulus
    x ^= x >> np.uint64(11)
    x = (x + k1) % modulus
    x = x * np.uint64(0xAC4C1B51) % modulus
    x ^= x >> np.uint64(15)
    x = x * np.uint64(0x31848BAB) % modulus
    x ^= x >> np.uint64(16)
    return x.astype(np.uint32)


def indices_of(n, start, run=None, matrix=None):
    """uint64 [n]: the global indices that the arguments of `optimizer_step` give its elements."""
    if matrix is not None:
        columns, rows = matrix
        batch, place = np.divmod(start + np.arange(n), columns * rows)
        row, column = np.divmod(place, columns)
        return (batch * (columns * rows) + np.ravel_multi_index((column, row), matrix)).astype(
            np.uint64
        )
    width, pitch = run or (max(n, 1), 0)
    elements = np.arange(n)
    return (start + elements // width * pitch + elements % width).astype(np.uint64)


# Rules: each takes and gives float32 arrays, with float32 scalars


def adamw(w, g, m, v, s):
    g = g * s["grad_scale"]
    m = m + (g - m) * s["one_minus_beta1"]
    v = v * s["beta2"] + (g * g) * s["one_minus_beta2"]
    w = w * s["decay"] - (m * s["step_size"]) / (np.sqrt(v) + s["eps"])
    return w, m, v


def adam(w, g, m, v, s):
    g = g * s["grad_scale"]
    g = g + w * s["weight_decay"]
    m = m + (g - m) * s["one_minus_beta1"]
    v = v * s["beta2"] + (g * g) * s["one_minus_beta2"]
    w = w - (m * s["step_size"]) / (np.sqrt(v) + s["eps"])
    return w, m, v


def sgd(w, g, s):
    g = g * s["grad_scale"]
    g = g + w * s["weight_decay"]
    return (w - g * s["lr"],)


def sgd_momentum(w, g, b, s):
    g = g * s["grad_scale"]
    g = g + w * s["weight_decay"]
    b = b * s["momentum"] + g * s["one_minus_dampening"]
    w = w - b * s["lr"]
    return w, b


def sgd_nesterov(w, g, b, s):
    g = g * s["grad_scale"]
    g = g + w * s["weight_decay"]
    b = b * s["momentum"] + g * s["one_minus_dampening"]
    d = g + b * s["nesterov_momentum"]
    w = w - d * s["lr"]
    return w, b


def accumulate(w, g, s):
    return (w + g * s["grad_scale"],)


def store(w, g, s):
    return (g * s["grad_scale"],)


# rule -> (function, its state roles with the noise of each)
RULES = {
    "adamw": (adamw, (("exp_avg", FIRST_MOMENT), ("exp_avg_sq", SECOND_MOMENT))),
    "adam": (adam, (("exp_avg", FIRST_MOMENT), ("exp_avg_sq", SECOND_MOMENT))),
    "sgd": (sgd, ()),
    "sgd_momentum": (sgd_momentum, (("momentum_buffer", FIRST_MOMENT),)),
    "sgd_nesterov": (sgd_nesterov, (("momentum_buffer", FIRST_MOMENT),)),
    "accumulate": (accumulate, ()),
    "store": (store, ()),
    **oracle_rules.RULES,
}


def scalars(rule, step, hyper):
    """What the host computes: float64 throughout, then one rounding of each result to float32.

    hyper: torch.optim's own names (lr, betas, eps, weight_decay, momentum, dampening, maximize),
    and `scale`, the clip coefficient. step counts from 1.
    """
    grad_scale = hyper.get("scale", 1.0) * (-1.0 if hyper.get("maximize") else 1.0)
    lr, weight_decay = hyper["lr"], hyper.get("weight_decay", 0.0)
    if rule in ("adamw", "adam"):
        beta1, beta2 = hyper["betas"]
        root = (1 - beta2**step) ** 0.5
        values = {
            "grad_scale": grad_scale,
            "decay": 1 - lr * weight_decay,
            "weight_decay": weight_decay,
            "beta2": beta2,
            "one_minus_beta1": 1 - beta1,
            "one_minus_beta2": 1 - beta2,
            "step_size": lr * root / (1 - beta1**step),
            "eps": hyper["eps"] * root,
        }
    elif rule in oracle_rules.RULES:
        values = {"grad_scale": grad_scale, **oracle_rules.scalars(rule, step, hyper)}
    else:
        momentum, first = hyper.get("momentum", 0.0), step == 1
        values = {
            "grad_scale": grad_scale,
            "weight_decay": weight_decay,
            "lr": lr,
            "momentum": 0.0 if first else momentum,
            "one_minus_dampening": 1.0 if first else 1 - hyper.get("dampening", 0.0),
            "nesterov_momentum": momentum,
        }
    return {name: np.float32(value) for name, value in values.items()}


# The step


def optimizer_step(
    rule, formats, planes, gradient, hyper, *, seed, name, step, start=0, run=None, matrix=None
):
    """One step of one parameter: decode, rule, encode.

    Args:
        rule: a key of RULES.
        formats: role -> format name; the roles are "weight" and the rule's state roles.
        planes: role -> planes, of any shape. At the first step, state planes of zeros.
        gradient: float32, or uint16 bits of bf16.
        hyper: see `scalars`.
        seed, name, step: what the noise depends on, beside the element; step counts from 1.
        start: global index of the first element, or its place in memory if there is a matrix.
        run: (elements per run, global indices from one run to the next) where these are several.
        matrix: (columns, rows) where the whole tensor lies in memory as such matrices, of which the
            global indices go down the columns.

    Returns:
        The new planes, role -> planes.
    """
    function, state_roles = RULES[rule]
    own = {"accumulate": GRADIENT, "average": FIRST_MOMENT}.get(rule, WEIGHT)
    roles = (("weight", own), *state_roles)
    g = bf16_to_fp32(gradient) if gradient.dtype == np.uint16 else gradient
    old = [decode(formats[role], planes[role]) for role, _ in roles]
    with np.errstate(all="ignore"):
        new = function(old[0], g, *old[1:], scalars(rule, step, hyper))
    result = {}
    for (role, (stream, shift)), x in zip(roles, new, strict=True):
        assert x.dtype == np.float32, (role, x.dtype)
        r = None
        if formats[role] in STOCHASTIC:
            base = stream_base(seed, tensor_key(name), stream)
            draws = noise_of(base, step, indices_of(x.size, start, run, matrix))
            r = (draws >> np.uint32(shift) & np.uint32(0xFFFF)).reshape(x.shape)
        result[role] = encode(formats[role], x, r)
    return result


def accumulate_stochastic(total, gradient, seed, name, step, number):
    """A sum of gradients and one more, both bf16 bits; `number` counts micro-batches from 0."""
    x = bf16_to_fp32(total) + bf16_to_fp32(gradient)
    return _stochastic_within_step(x, GRADIENT, seed, name, step, number)


def sum_of_ranks(parts):
    """The fp32 sum of bf16 bits, the first rank's first."""
    total = bf16_to_fp32(parts[0])
    for each in parts[1:]:
        total = total + bf16_to_fp32(each)
    return total


def mean_of_ranks(parts, seed, name, step, number):
    """The mean of bf16 bits, rounded once; `number` counts the reductions for a step from 1."""
    mean = sum_of_ranks(parts) / np.float32(len(parts))
    return _stochastic_within_step(mean, REDUCTION, seed, name, step, number)


def _stochastic_within_step(x, draw, seed, name, step, number):
    stream, shift = draw
    t0, t1 = stream_base(seed, tensor_key(name), stream)
    k0 = mix32((t0 + step * 0x9E3779B9) % 2**32)
    draws = noise_from((k0, mix32(t1 ^ k0)), number, 0, x.size) >> np.uint32(shift)
    return bf16_stochastic(x, (draws & np.uint32(0xFFFF)).reshape(x.shape))
