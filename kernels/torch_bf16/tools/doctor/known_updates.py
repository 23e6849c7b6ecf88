"""The updates that an optimizer's state determines: of torch's common classes, and ours.

A checkpoint does not name its optimizer's class, so an update is recognized by the names of what is
saved. An option or a state that torch's class does not have may be a part of another update, which
is then unknown.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bf16.optim.lion import Lion
from torch_bf16.rules.weight_decay import decay_per_lr
from torch_bf16.states.views import COUNTER, MASTERS
from torch_bf16.tools.foreign_states import extra_bits

from .exact import Read, moment

__all__ = ["Update", "finite", "known_update", "steps_taken"]

Update = Callable[[Tensor, int, int], Tensor]
"""``update(w, start, stop)``: the update of those elements of a flattened weight, which are ``w``
now, in fp32."""

# What else a group has: names, and what torch's schedules leave in it.
_BESIDE = {
    *("param_names", "name", "fully_decoupled_weight_decay", "initial_lr", "swa_lr"),
    *("max_lr", "min_lr", "max_momentum", "base_momentum"),
}
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg")
_STATES = {"step", COUNTER, *MASTERS, *_MOMENTS, *(f"{name}_scale" for name in _MOMENTS)}


def known_update(
    state: Mapping[str, Any], group: Mapping[str, Any], shape: Sequence[int], lr: float
) -> Update | None:
    """The next update of a weight, as if its gradient were the mean that is saved.

    Known are those of Adam, AdamW, Lion, and of SGD and RMSprop with momentum.

    Args:
        state: what the optimizer keeps for the weight.
        group: its hyperparameters.
        shape: the weight's shape; moments of another one, as of a projection, say nothing here.
        lr: the learning rate.
    """
    if not all(
        key in _STATES or extra_bits(key) or each is None or isinstance(each, (bool, str))
        for key, each in state.items()
    ):
        return None
    # Of options that are all another class's, too, one that only this class has.
    buffer = moment(state, "momentum_buffer", shape)
    if buffer is not None:
        known = _is_of(torch.optim.SGD, group, "dampening")
        known = known or _is_of(torch.optim.RMSprop, group, "centered")
        return (lambda w, start, stop: buffer(start, stop) * -lr) if known else None
    first, betas = moment(state, "exp_avg", shape), group.get("betas")
    if first is None or not isinstance(betas, (tuple, list)) or len(betas) != 2:
        return None
    second = moment(state, "max_exp_avg_sq", shape) or moment(state, "exp_avg_sq", shape)
    if second is not None:
        known = _is_of(torch.optim.Adam, group, "amsgrad")
        return _adam(first, second, betas, group, steps_taken(state), lr) if known else None
    if not _is_of(Lion, group):
        return None
    decay = _decay(group)
    return lambda w, start, stop: first(start, stop).sign_().add_(w, alpha=decay).mul_(-lr)


def steps_taken(state: Mapping[str, Any]) -> int:
    """How many steps a weight's optimizer has taken; 0 if unknown."""
    return int(finite(state.get("step"), 0.0))


def finite(value: Any, default: float) -> float:
    """A number of a checkpoint; ``default`` if it is anything else, NaN or infinite."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else default


def _is_of(kind: type, group: Mapping[str, Any], *own: str) -> bool:
    """Whether a group's options are a class's, with those that only this class has."""
    return (
        group.keys() <= {*inspect.signature(kind).parameters, *_BESIDE} and {*own} <= group.keys()
    )


def _decay(group: Mapping[str, Any]) -> float:
    options = ("weight_decay", "fully_decoupled_weight_decay")
    decay = decay_per_lr({key: finite(group.get(key), 0.0) for key in options})
    # A decay that is not decoupled is in the moments.
    return decay if group.get("decoupled_weight_decay", True) else 0.0


def _adam(
    first: Read,
    second: Read,
    betas: Sequence[Any],
    group: Mapping[str, Any],
    step: int,
    lr: float,
) -> Update:
    eps, decay = finite(group.get("eps"), 1e-8), _decay(group)
    rates = [min(max(finite(beta, 0.0), 0.0), 1 - 1e-12) for beta in betas]
    # Moments of an unknown age are as old as can be.
    bias1, bias2 = (1 - beta**step if step else 1.0 for beta in rates)

    def update(w: Tensor, start: int, stop: int) -> Tensor:
        root = second(start, stop).div_(bias2).sqrt_().add_(eps)
        return first(start, stop).div_(bias1).div_(root).add_(w, alpha=decay).mul_(-lr)

    return update
