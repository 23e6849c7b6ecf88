"""The next update, by an optimizer's state in a checkpoint, and what rounding leaves of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from torch_bf16.checkpoints.reader import SavedTensor
from torch_bf16.rules.weight_decay import decay_per_lr

from .exact import CHUNK, Read, has_master, hides_bits, moment
from .movement import half_spacings

__all__ = ["NextUpdate", "Rounding", "finite", "next_update", "rounding"]

Rounding = str
"""``"nearest"``, ``"stochastic"``, ``"none"`` if weights have more bits than bf16 or the lost bits
are kept, or ``"unknown"``."""

# Options of SGD and of RMSprop, whose buffer is the update. Muon and others make theirs from it.
_UPDATE_IS_BUFFER = ("dampening", "centered")


@dataclass(frozen=True)
class NextUpdate:
    """What the next step does to one weight.

    Attributes:
        update: root mean square of the update.
        survived: ``<s, d> / <d, d>`` of the update ``d`` and of ``s``, what rounding to nearest
            bf16 leaves of it.
        below: share of the elements whose update is less than half a bf16 spacing.
        lr: the group's learning rate, or its initial one if that has come down to 0.
        step: how many steps were taken.
    """

    update: float
    survived: float
    below: float
    lr: float
    step: int


def rounding(tensor: SavedTensor, state: Mapping[str, Any], header: Mapping[str, Any]) -> Rounding:
    """What happens to updates that are smaller than a weight's last place.

    Args:
        tensor: the weight.
        state: what the optimizer keeps for it, possibly nothing.
        header: the header that our optimizers save; empty for others.
    """
    kept = has_master(tensor, state) or hides_bits(tensor, state)
    if kept or tensor.dtype.itemsize >= 4:
        return "none"
    if tensor.dtype != torch.bfloat16:
        return "unknown"
    if recipe := header.get("recipe"):
        return "nearest" if recipe.get("weights") == "bf16_nearest" else "stochastic"
    moments = [each for each in state.values() if isinstance(each, SavedTensor)]
    # torch gives moments their parameter's dtype: with fp32 ones it was fp32, and saved in bf16.
    all_bf16 = bool(moments) and all(each.dtype == torch.bfloat16 for each in moments)
    return "nearest" if all_bf16 else "unknown"


def next_update(
    weight: Read,
    state: Mapping[str, Any],
    group: Mapping[str, Any],
    shape: Sequence[int],
    lr: float | None,
) -> NextUpdate | None:
    """The next update of Adam's kind, or of SGD or RMSprop with momentum; None for any other.

    Args:
        weight: reads its elements as fp32.
        state: what the optimizer keeps for it.
        group: its hyperparameters.
        shape: the weight's shape; moments of another one, as of a projection, say nothing here.
        lr: a learning rate in place of the group's.
    """
    rate = finite(group.get("lr"), 0.0) or finite(group.get("initial_lr"), 0.0)
    rate = rate if lr is None else lr
    step = int(finite(state.get("step"), 0.0))
    update = _update(state, group, shape, rate, step)
    numel = prod(shape)
    if update is None or not rate or not numel:
        return None
    product = squares = 0.0
    below = 0
    for start in range(0, numel, CHUNK):
        stop = min(start + CHUNK, numel)
        w = weight(start, stop)
        d = update(w, start, stop).nan_to_num_(0.0, 0.0, 0.0)
        stored = (w + d).bfloat16().float() - w.bfloat16().float()
        product += float(stored.double() @ d.double())
        squares += float(d.double() @ d.double())
        below += int((d.abs() < half_spacings(w)).sum())
    if not squares:
        return None
    return NextUpdate(math.sqrt(squares / numel), product / squares, below / numel, rate, step)


def _update(
    state: Mapping[str, Any], group: Mapping[str, Any], shape: Sequence[int], lr: float, step: int
) -> Callable[[Tensor, int, int], Tensor] | None:
    first, second, buffer = (
        moment(state, name, shape) for name in ("exp_avg", "exp_avg_sq", "momentum_buffer")
    )
    if buffer is not None and any(key in group for key in _UPDATE_IS_BUFFER):
        return lambda w, start, stop: buffer(start, stop) * -lr
    betas = group.get("betas")
    if first is None or second is None or not isinstance(betas, (tuple, list)) or len(betas) != 2:
        return None
    rates = [min(max(finite(beta, 0.0), 0.0), 1 - 1e-12) for beta in betas]
    bias1, bias2 = (1 - beta ** max(step, 1) for beta in rates)
    eps = finite(group.get("eps"), 1e-8)
    options = ("weight_decay", "fully_decoupled_weight_decay")
    decay = decay_per_lr({key: finite(group.get(key), 0.0) for key in options})
    # A decay that is not decoupled is in the moments.
    decay = decay if group.get("decoupled_weight_decay", True) else 0.0

    def adam(w: Tensor, start: int, stop: int) -> Tensor:
        root = second(start, stop).div_(bias2).sqrt_().add_(eps)
        return first(start, stop).div_(bias1).div_(root).add_(w, alpha=decay).mul_(-lr)

    return adam


def finite(value: Any, default: float) -> float:
    """A number of a checkpoint; ``default`` if it is anything else, NaN or infinite."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else default
