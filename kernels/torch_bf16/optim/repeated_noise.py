"""Warns of optimizers that draw the noise of earlier ones over the same weights.

The step keys the noise, and a new optimizer counts from 0. Programs that make one for each round,
as in federated averaging, or for each restart, round the same weights by the same draws each time,
and their errors add up instead of averaging out.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from torch_bf16.engine.member import Member
from torch_bf16.errors import warn_once
from torch_bf16.model.watched_weight import bits_of, is_readable

if TYPE_CHECKING:
    from .optimizer import BF16Optimizer

__all__ = ["warn_if_repeated"]

# Two or three, such as the stages of a training, do little harm: errors grow by the square root.
_MANY = 4


class _Beginning(NamedTuple):
    """What is known of a weight as an optimizer began to train it.

    Attributes:
        drawn_by: the seed, and the name that keys the noise.
        count: how many optimizers have begun with these, each where the one before had moved it.
        bits: of its first elements.
    """

    drawn_by: tuple[int, str]
    count: int
    bits: Tensor


_lock = threading.Lock()
_beginnings: WeakIdKeyDictionary = WeakIdKeyDictionary()


def warn_if_repeated(optimizer: BF16Optimizer, members: Sequence[Member]) -> None:
    """Warn once if many optimizers have begun to train a weight at step 0, with one seed.

    Args:
        optimizer: an optimizer whose step is planned.
        members: those that are new in the plan; one stands for all.
    """
    # torch swaps no tensors that have weak references.
    if torch.__future__.get_swap_module_params_on_conversion():
        return
    member = next((each for each in members if _begins(each)), None)
    if member is None:
        return
    drawn_by, bits = (optimizer.recipe.seed, member.shard.name), bits_of(member.parameter).cpu()
    with _lock:
        last = _beginnings.get(member.parameter)
        count = 1
        if last is not None and last.drawn_by == drawn_by:
            count = last.count + 1 if _went_on(last.bits, bits) else 1
            # A sweep begins with the same numbers each time.
            count = last.count if torch.equal(last.bits, bits) else count
        _beginnings[member.parameter] = _Beginning(drawn_by, count, bits)
    if count >= _MANY:
        kind, seed = type(optimizer).__name__, optimizer.recipe.seed
        warn_once(
            f"{count} optimizers, this {kind} is the last, have trained the same weights one after "
            f"the other, each from step 0 with seed {seed}: they draw the same noise, so that the "
            "roundings of one round are those of every round, and do not average out. Keep one "
            "optimizer, or load the state dict of the one before, or give each a seed of its own: "
            f"torch_bf16.get_recipe({optimizer.recipe.name!r}, seed=round)",
            key="repeated noise",
        )


def _begins(member: Member) -> bool:
    weight = member.parameter
    if not (member.weights.stochastic and is_readable(weight)):
        return False
    return int(member.state["step"]) == 0


def _went_on(before: Tensor, now: Tensor) -> bool:
    """Whether a weight was trained on from these numbers, and not made anew."""
    if before.shape != now.shape:
        return False
    one, other = (each.view(torch.bfloat16).float() for each in (before, now))
    # Unrelated numbers are further apart than their size.
    return bool((other - one).square().sum() < one.square().sum() / 2)
