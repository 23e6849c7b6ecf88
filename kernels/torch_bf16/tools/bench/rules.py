"""Every elementwise rule in every format, beside AdamW in ``bf16-stochastic``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch_bf16 import rules
from torch_bf16.formats import ROLES
from torch_bf16.tools.recipes import BY_BYTES

from .entries import OPTIONS, Entry, of_recipe, ours

__all__ = ["BASE", "RULES", "every_rule"]

BASE = "bf16-stochastic"

_BETAS = {name: OPTIONS[name] for name in ("lr", "betas", "weight_decay")}
_RATE = {name: OPTIONS[name] for name in ("lr", "weight_decay")}
_ROOT = {**_RATE, "eps": OPTIONS["eps"]}

RULES: dict[str, tuple[rules.Rule, str, Mapping[str, Any]]] = {
    "AdamW": (rules.ADAMW, "AdamW", OPTIONS),
    "Adam": (rules.ADAM, "Adam", OPTIONS),
    "AdamW, AMSGrad": (rules.ADAMW_AMSGRAD, "AdamW", {**OPTIONS, "amsgrad": True}),
    "Adam, AMSGrad": (rules.ADAM_AMSGRAD, "Adam", {**OPTIONS, "amsgrad": True}),
    "NAdam": (rules.NADAM, "NAdam", OPTIONS),
    "RAdam": (rules.RADAM, "RAdam", OPTIONS),
    "ADOPT": (rules.ADOPT, "ADOPT", OPTIONS),
    "Lion": (rules.LION, "Lion", _BETAS),
    "AdamW, cautious": (rules.CAUTIOUS_ADAMW, "AdamW", {**OPTIONS, "cautious": True}),
    "AdamW, clipped": (rules.STABLE_ADAMW, "AdamW", {**OPTIONS, "update_clipping": True}),
    "Lion, cautious": (rules.CAUTIOUS_LION, "Lion", {**_BETAS, "cautious": True}),
    "Schedule-free AdamW": (rules.SCHEDULE_FREE_ADAMW, "AdamWScheduleFree", OPTIONS),
    "SGD": (rules.SGD, "SGD", _RATE),
    "SGD, momentum": (rules.SGD_MOMENTUM, "SGD", {**_RATE, "momentum": 0.9}),
    "SGD, Nesterov": (rules.SGD_NESTEROV, "SGD", {**_RATE, "momentum": 0.9, "nesterov": True}),
    "Schedule-free SGD": (rules.SCHEDULE_FREE_SGD, "SGDScheduleFree", _RATE),
    "Adagrad": (rules.ADAGRAD, "Adagrad", _ROOT),
    "RMSprop": (rules.RMSPROP, "RMSprop", _ROOT),
    "RMSprop, momentum": (rules.RMSPROP_MOMENTUM, "RMSprop", {**_ROOT, "momentum": 0.9}),
    "RMSprop, centered": (rules.RMSPROP_CENTERED, "RMSprop", {**_ROOT, "centered": True}),
    "RMSprop, both": (
        rules.RMSPROP_CENTERED_MOMENTUM,
        "RMSprop",
        {**_ROOT, "centered": True, "momentum": 0.9},
    ),
}
"""The rule, its class in ``torch_bf16`` and the arguments, by the name in the table."""


def every_rule(backend: str | None) -> tuple[Entry, ...]:
    """The base, and each rule in each of the formats.

    Args:
        backend: None for the one that is chosen for the device.
    """
    found = {}
    for name, (rule, optimizer, arguments) in RULES.items():
        roles = [state.role for state in rule.states if state.role in ROLES]
        for size, recipe in BY_BYTES.items():
            # A rule without second moments, say, has fewer formats than there are recipes.
            stored = (name, recipe.weights, *(getattr(recipe, role) for role in roles))
            made = of_recipe(f"{name} {size}", recipe, backend, optimizer, arguments=arguments)
            # Some rules keep one number more than AdamW, in fp32.
            found.setdefault(stored, replace(made, estimate=made.estimate + 4))
    return (*ours([BASE], backend), *found.values())
