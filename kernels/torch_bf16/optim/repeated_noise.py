"""Warns of optimizers that draw the noise of earlier ones over the same weights.

The step keys the noise, and a new optimizer counts from 0. Programs that make one for each round,
as in federated averaging, or for each restart, round the same weights by the same draws each time,
and their errors add up instead of averaging out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torch_bf16.engine.member import Member
from torch_bf16.errors import warn_once, with_article
from torch_bf16.locks import fork_safe_lock
from torch_bf16.model.watched_weight import bits_of, is_readable

if TYPE_CHECKING:
    from .optimizer import BF16Optimizer

__all__ = ["warn_if_repeated"]

# Two or three, such as the stages of a training, do little harm: errors grow by the square root.
_MANY = 4
# How many weights are remembered, those of the latest beginnings; how many beginnings of each; and
# how many elements of each beginning.
_WEIGHTS, _BEGINNINGS, _ELEMENTS = 64, 32, 256


class _Beginning(NamedTuple):
    """Where optimizers began to train a weight: the bits of its first elements, and their seeds."""

    bits: Tensor
    seeds: set[int]


_lock = fork_safe_lock()
# By a weight's id and name, one training: each beginning where the one before had moved the weight.
# Not by weak references, because torch swaps no tensors that have some; a weight that has the id of
# another one is unlike it, or begins where that one did.
_beginnings: dict[tuple[int, str], list[_Beginning]] = {}


def warn_if_repeated(optimizer: BF16Optimizer, members: Sequence[Member]) -> None:
    """Warn once if many optimizers have begun to train a weight at step 0, with one seed.

    Args:
        optimizer: an optimizer whose step is planned.
        members: those that are new in the plan; the first and the last one stand for all.
    """
    begun = [each for each in members if _begins(each)]
    seed = optimizer.recipe.seed
    count = max((_count(each, seed) for each in begun[:1] + begun[1:][-1:]), default=0)
    if count >= _MANY:
        warn_once(
            f"the same weights have begun at step 0 {count} times, by optimizers made anew (now "
            f"{with_article(optimizer)}) or by states that were reset, each time with seed {seed}: "
            "the noise is the same each time, so that the roundings of one round are those of "
            "every round, and do not average out. Keep one optimizer and its state, or load the "
            "state dict of the one before, or give each a seed of its own: "
            "torch_bf16.get_recipe(recipe, seed=round)",
            key="repeated noise",
        )


def _count(member: Member, seed: int) -> int:
    """How often a weight has begun at step 0 with this seed, each time where it had been moved."""
    key = id(member.parameter), member.shard.name
    bits = bits_of(member.parameter, _ELEMENTS).cpu()
    with _lock:
        before = _beginnings.pop(key, [])
        again = next((n for n, each in enumerate(before) if _is_same(each.bits, bits)), None)
        if again is not None:  # a sweep, or a ticket that is rewound and pruned
            before = before[: again + 1]
            before[-1].seeds.add(seed)
        else:
            went_on = before and _went_on(before[-1].bits, bits)
            before = [*(before if went_on else []), _Beginning(bits, {seed})]
        # The first, which a program goes back to, and the last.
        _beginnings[key] = before[:1] + before[1:][1 - _BEGINNINGS :]
        if len(_beginnings) > _WEIGHTS:
            del _beginnings[next(iter(_beginnings))]
    return sum(seed in each.seeds for each in before)


def _begins(member: Member) -> bool:
    weight = member.parameter
    if not (member.weights.stochastic and is_readable(weight)):
        return False
    return int(member.state["step"]) == 0


def _is_same(before: Tensor, now: Tensor) -> bool:
    """Whether no number is another one, except where a mask has made it zero."""
    if before.shape != now.shape:
        return False
    return not ((before != now) & (now.view(torch.bfloat16) != 0)).any()


def _went_on(before: Tensor, now: Tensor) -> bool:
    """Whether a weight was trained on from these numbers, and not made anew."""
    if before.shape != now.shape:
        return False
    one, other = (each.view(torch.bfloat16).float() for each in (before, now))
    # Unrelated numbers are further apart than their size.
    return bool((other - one).square().sum() < one.square().sum() / 2)
