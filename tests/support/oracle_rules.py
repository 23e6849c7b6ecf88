"""The oracle's rules beyond Adam and SGD, worded after their papers and torch's documentation.

Each takes and gives float32 arrays, with float32 scalars; see ``oracle.py``.
"""

import math

import numpy as np

FIRST_MOMENT, SECOND_MOMENT = (1, 16), (0, 0)
ONE = np.float32(1)


def maximum(a, b):
    """IEEE 754-2019 says maximum for this one, which keeps a NaN; of two zeros, the second."""
    return np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), np.where(a > b, a, b))


def not_finite(x):
    """NaN where x is infinite or NaN, else zero."""
    return np.where(np.isfinite(x), np.float32(0), np.float32(np.nan))


def adamw_amsgrad(w, g, m, v, highest, s):
    g = g * s["grad_scale"]
    m = m + (g - m) * s["one_minus_beta1"]
    v = v * s["beta2"] + (g * g) * s["one_minus_beta2"]
    highest = maximum(highest, v)
    w = w * s["decay"] - (m * s["step_size"]) / (np.sqrt(highest) + s["eps"])
    return w, m, v, highest


def adam_amsgrad(w, g, m, v, highest, s):
    g = g * s["grad_scale"] + w * s["weight_decay"]
    return adamw_amsgrad(w, g, m, v, highest, {**s, "grad_scale": ONE, "decay": ONE})


def nadam(w, g, m, v, s):
    g = g * s["grad_scale"] + w * s["weight_decay"]
    m = m + (g - m) * s["one_minus_beta1"]
    v = v * s["beta2"] + (g * g) * s["one_minus_beta2"]
    update = (g * s["gradient_size"] + m * s["momentum_size"]) / (np.sqrt(v) + s["eps"])
    return w * s["decay"] - update, m, v


def radam(w, g, m, v, s):
    g = g * s["grad_scale"] + w * s["weight_decay"]
    m = m + (g - m) * s["one_minus_beta1"]
    v = v * s["beta2"] + (g * g) * s["one_minus_beta2"]
    update = (m * s["step_size"]) / (np.sqrt(v) * s["root_size"] + s["eps"])
    return w * s["decay"] - update, m, v


def adopt(w, g, m, v, s):
    g = g * s["grad_scale"] + w * s["weight_decay"]
    u = g / maximum(np.sqrt(v), np.full_like(v, s["eps"]))
    u = np.where(np.abs(u) > s["clip"], np.sign(u) * s["clip"], u) + not_finite(g)
    m = m + (u - m) * s["one_minus_beta1"]
    v = v * s["beta2"] + (g * g) * s["one_minus_beta2"]
    return w * s["decay"] - m * s["lr"], m, v


def lion(w, g, m, s):
    g = g * s["grad_scale"]
    c = m + (g - m) * s["one_minus_beta1"]
    m = m + (g - m) * s["one_minus_beta2"]
    w = w * s["decay"] - (np.where(c == 0, np.float32(0), np.sign(c)) + not_finite(c)) * s["lr"]
    return w, m


def mean_of(x):
    """Of numbers that are not negative, in whole 65536ths of at most 16384; float64."""
    units = [int(min(each, 16384.0) * 65536.0) if each == each else 2**30 for each in x.tolist()]
    return sum(units) / (65536.0 * max(len(units), 1))


def masked(u, direction, g):
    """An update where the direction has the gradient's sign, and more of it for where not."""
    agree = (direction > 0) & (g > 0) | (direction < 0) & (g < 0)
    mask = agree.astype(np.float32) + np.where(np.isnan(direction + g), np.float32(np.nan), 0)
    mask = np.where(np.isinf(direction) & np.isinf(g), agree.astype(np.float32), mask)
    mask = mask.astype(np.float32)
    return u * (mask * np.float32(1 / max(mean_of(mask), 0.001)))


def cautious_adamw(w, g, m, v, s):
    g = g * s["grad_scale"]
    m = m + (g - m) * s["one_minus_beta1"]
    v = v * s["beta2"] + (g * g) * s["one_minus_beta2"]
    u = (m * s["step_size"]) / (np.sqrt(v) + s["eps"])
    return w * s["decay"] - masked(u, m, g), m, v


def cautious_lion(w, g, m, s):
    g = g * s["grad_scale"]
    c = m + (g - m) * s["one_minus_beta1"]
    u = (np.where(c == 0, np.float32(0), np.sign(c)) + not_finite(c)) * s["lr"]
    return w * s["decay"] - masked(u, c, g), m + (g - m) * s["one_minus_beta2"]


def stable_adamw(w, g, m, v, s):
    g = g * s["grad_scale"]
    m = m + (g - m) * s["one_minus_beta1"]
    v = v * s["beta2"] + (g * g) * s["one_minus_beta2"]
    ratio = (g * s["root"]) / maximum(np.sqrt(v), np.full_like(v, s["eps"]))
    factor = np.float32(1 / max(math.sqrt(mean_of(ratio * ratio)), 1.0))
    u = (m * s["step_size"]) / (np.sqrt(v) + s["eps"])
    return w - (w * s["penalty"] + u) * factor, m, v


def adagrad(w, g, total, s):
    g = g * s["grad_scale"] + w * s["weight_decay"]
    total = (total * s["kept"] + s["start"]) + g * g
    return w - (g * s["lr"]) / (np.sqrt(total) + s["eps"]), total


def rmsprop(w, g, v, s):
    g, v, root = _rmsprop_root(w, g, v, s)
    return w - (g * s["lr"]) / root, v


def rmsprop_momentum(w, g, v, b, s):
    g, v, root = _rmsprop_root(w, g, v, s)
    b = b * s["momentum"] + g / root
    return w - b * s["lr"], v, b


def rmsprop_centered(w, g, v, a, s):
    g, v, a, root = _rmsprop_centered_root(w, g, v, a, s)
    return w - (g * s["lr"]) / root, v, a


def rmsprop_centered_momentum(w, g, v, a, b, s):
    g, v, a, root = _rmsprop_centered_root(w, g, v, a, s)
    b = b * s["momentum"] + g / root
    return w - b * s["lr"], v, a, b


def _rmsprop_root(w, g, v, s):
    g = g * s["grad_scale"] + w * s["weight_decay"]
    v = v * s["alpha"] + (g * g) * s["one_minus_alpha"]
    return g, v, np.sqrt(v) + s["eps"]


def _rmsprop_centered_root(w, g, v, a, s):
    g, v, _ = _rmsprop_root(w, g, v, s)
    a = a + (g - a) * s["one_minus_alpha"]
    return g, v, a, np.sqrt(maximum(v - a * a, not_finite(v))) + s["eps"]


def muon(w, g, s):
    return (w * s["decay"] - g * s["lr"],)


def schedule_free_adamw(y, g, z, v, s):
    g = g * s["grad_scale"]
    v = v * s["beta2"] + (g * g) * s["one_minus_beta2"]
    u = (g * s["root"]) / (np.sqrt(v) + s["eps"]) + y * s["weight_decay"]
    return *_schedule_free(y, z, u, s), v


def schedule_free_sgd(y, g, z, s):
    return _schedule_free(y, z, g * s["grad_scale"] + y * s["weight_decay"], s)


def _schedule_free(y, z, u, s):
    z = z * s["kept"] + y * s["start"]
    return (y - (y - z) * s["share"]) - u * s["size"], z - u * s["lr"]


def average(w, g, s):
    return (w + (g * s["grad_scale"] - w) * s["rate"],)


# rule -> (function, its states with the noise of each)
RULES = {
    **{
        name: (function, (("exp_avg", FIRST_MOMENT), ("exp_avg_sq", SECOND_MOMENT)))
        for name, function in (
            *(("nadam", nadam), ("radam", radam), ("adopt", adopt)),
            *(("cautious_adamw", cautious_adamw), ("stable_adamw", stable_adamw)),
        )
    },
    **{
        name: (
            function,
            (
                ("exp_avg", FIRST_MOMENT),
                ("exp_avg_sq", SECOND_MOMENT),
                ("max_exp_avg_sq", SECOND_MOMENT),
            ),
        )
        for name, function in (("adamw_amsgrad", adamw_amsgrad), ("adam_amsgrad", adam_amsgrad))
    },
    "lion": (lion, (("exp_avg", FIRST_MOMENT),)),
    "cautious_lion": (cautious_lion, (("exp_avg", FIRST_MOMENT),)),
    "adagrad": (adagrad, (("sum", SECOND_MOMENT),)),
    "rmsprop": (rmsprop, (("square_avg", SECOND_MOMENT),)),
    "rmsprop_momentum": (
        rmsprop_momentum,
        (("square_avg", SECOND_MOMENT), ("momentum_buffer", FIRST_MOMENT)),
    ),
    "rmsprop_centered": (
        rmsprop_centered,
        (("square_avg", FIRST_MOMENT), ("grad_avg", FIRST_MOMENT)),
    ),
    "rmsprop_centered_momentum": (
        rmsprop_centered_momentum,
        (
            ("square_avg", FIRST_MOMENT),
            ("grad_avg", FIRST_MOMENT),
            ("momentum_buffer", FIRST_MOMENT),
        ),
    ),
    "schedule_free_adamw": (
        schedule_free_adamw,
        (("z", FIRST_MOMENT), ("exp_avg_sq", SECOND_MOMENT)),
    ),
    "schedule_free_sgd": (schedule_free_sgd, (("z", FIRST_MOMENT),)),
    "average": (average, ()),
    "muon": (muon, ()),
}


def mu(step, hyper):
    return hyper["betas"][0] * (1 - 0.5 * 0.96 ** (step * hyper["momentum_decay"]))


def scalars(rule, step, hyper):
    """float64; hyper has torch.optim's own names."""
    lr, weight_decay, eps = hyper["lr"], hyper.get("weight_decay", 0.0), hyper["eps"]
    if rule == "muon":
        return {"decay": 1 - lr * weight_decay, "lr": lr}
    if rule == "average":
        return {"rate": hyper["rate"]}
    if rule.startswith("schedule_free"):
        # The group's count and not the step: it is what the paper calls t.
        t = hyper["k"] + 1
        lr *= min(1.0, t / hyper["warmup_steps"]) if hyper["warmup_steps"] else 1.0
        weight = t ** hyper["r"] * max(lr, hyper["lr_max"]) ** hyper["weight_lr_power"]
        share = weight / (hyper["weight_sum"] + weight)
        beta1 = hyper["betas"][0] if rule.endswith("adamw") else hyper["momentum"]
        values = {"lr": lr, "weight_decay": weight_decay, "share": share}
        values |= {"size": lr * (1 - beta1 * (1 - share))}
        # The iterate starts at the weight.
        values |= {"kept": -0.0, "start": 1.0} if step == 1 else {"kept": 1.0, "start": 0.0}
        if rule.endswith("sgd"):
            return values
        beta2 = hyper["betas"][1]
        root = math.sqrt(1 - beta2**step)
        more = {"beta2": beta2, "one_minus_beta2": 1 - beta2, "root": root, "eps": eps * root}
        return {**values, **more}
    if rule == "adagrad":
        start = hyper["initial_accumulator_value"] if step == 1 else 0.0
        clr = lr / (1 + (step - 1) * hyper["lr_decay"])
        kept = 0.0 if step == 1 else 1.0
        return {"weight_decay": weight_decay, "lr": clr, "eps": eps, "kept": kept, "start": start}
    if rule.startswith("rmsprop"):
        values = {"lr": lr, "alpha": hyper["alpha"], "one_minus_alpha": 1 - hyper["alpha"]}
        momentum = hyper.get("momentum", 0.0)
        return {**values, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
    beta1, beta2 = hyper["betas"]
    always = ("adamw_amsgrad", "lion", "cautious_adamw", "cautious_lion", "stable_adamw")
    decoupled = hyper.get("decoupled_weight_decay", False) or rule in always
    values = {
        "decay": 1 - lr * weight_decay if decoupled else 1.0,
        "weight_decay": 0.0 if decoupled else weight_decay,
        "lr": lr,
        "beta2": beta2,
        "one_minus_beta1": 1 - beta1,
        "one_minus_beta2": 1 - beta2,
    }
    root = math.sqrt(1 - beta2**step)
    if rule == "stable_adamw":
        values |= {"root": root, "penalty": lr * weight_decay}
    if rule.endswith("amsgrad") or rule in ("cautious_adamw", "stable_adamw"):
        return {**values, "step_size": lr * root / (1 - beta1**step), "eps": eps * root}
    if rule == "nadam":
        product = math.prod(mu(t, hyper) for t in range(1, step + 1))
        after = product * mu(step + 1, hyper)
        return {
            **values,
            "gradient_size": lr * (1 - mu(step, hyper)) / (1 - product) * root,
            "momentum_size": lr * mu(step + 1, hyper) / (1 - after) * root,
            "eps": eps * root,
        }
    if rule == "radam":
        rho_max = 2 / (1 - beta2) - 1
        rho = rho_max - 2 * step * beta2**step / (1 - beta2**step)
        size = lr / (1 - beta1**step)
        if rho <= 5:
            return {**values, "step_size": size, "root_size": 0.0, "eps": 1.0}
        r = (rho - 4) * (rho - 2) * rho_max / ((rho_max - 4) * (rho_max - 2) * rho)
        return {**values, "step_size": size * math.sqrt(r) * root, "root_size": 1.0, "eps": eps}
    if rule == "adopt":
        clip = (step - 1) ** 0.25 if hyper["clip"] else np.finfo(np.float32).max
        values |= {"eps": eps, "clip": clip}
        if step == 1:
            values |= {"lr": 0.0, "decay": 1.0, "one_minus_beta1": 0.0, "beta2": 0.0}
            values |= {"one_minus_beta2": 1.0}
    return values
