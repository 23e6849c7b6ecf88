"""The next update, by an optimizer's state in a checkpoint, and what rounding leaves of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from torch_bf16.checkpoints.reader import SavedTensor

from .exact import CHUNK, Read, has_master, hides_bits
from .known_updates import finite, known_update, steps_taken
from .movement import half_spacings

__all__ = ["NextUpdate", "Rounding", "next_update", "rounding"]

Rounding = str
"""``"nearest"``, ``"stochastic"``, ``"none"`` if weights have more bits than bf16 or the lost bits
are kept, or ``"unknown"``."""


@dataclass(frozen=True)
class NextUpdate:
    """What the next step does to one weight.

    Attributes:
        update: root mean square of the update.
        survived: ``<s, d> / <d, d>`` of the update ``d`` and of ``s``, what rounding to nearest
            bf16 leaves of it.
        below: share of the elements whose update is less than half a bf16 spacing.
        broken: elements for which the state is not finite, or makes no finite update.
        lr: the group's learning rate, or its initial one if that has come down to 0.
        step: how many steps were taken.
    """

    update: float
    survived: float
    below: float
    broken: int
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
    """The next update of a weight; None if :func:`.known_update` does not know it.

    Args:
        weight: reads its elements as fp32.
        state: what the optimizer keeps for it.
        group: its hyperparameters.
        shape: the weight's shape; moments of another one, as of a projection, say nothing here.
        lr: a learning rate in place of the group's.
    """
    rate = finite(group.get("lr"), 0.0) or finite(group.get("initial_lr"), 0.0)
    rate = rate if lr is None else lr
    update = known_update(state, group, shape, rate)
    numel = prod(shape)
    if update is None or not rate:
        return None
    product = squares = 0.0
    below = broken = 0
    for start in range(0, numel, CHUNK):
        stop = min(start + CHUNK, numel)
        w = weight(start, stop)
        d = update(w, start, stop)
        broken += stop - start - int(d.isfinite().count_nonzero())
        d.nan_to_num_(0.0, 0.0, 0.0)
        stored = (w + d).bfloat16().float() - w.bfloat16().float()
        product += float(stored.double() @ d.double())
        squares += float(d.double() @ d.double())
        below += int((d.abs() < half_spacings(w, d)).sum())
    if not squares and not broken:
        return None
    survived = product / squares if squares else 1.0
    size, step = math.sqrt(squares / numel), steps_taken(state, group)
    return NextUpdate(size, survived, below / numel, broken, rate, step)
