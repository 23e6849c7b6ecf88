"""Warns of optimizers that draw the same noise, because each has a single weight without a name.

torch's tutorial on steps in the backward pass makes one optimizer for each parameter of a model.
Each is parameter 0 of its optimizer then, and its position is all that keys its noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch_bf16.engine.engine import Engine
from torch_bf16.engine.member import Member
from torch_bf16.errors import warn_once
from torch_bf16.locks import fork_safe_lock
from torch_bf16.model.cast_modules import cast_models

if TYPE_CHECKING:
    from .optimizer import BF16Optimizer

__all__ = ["warn_if_shared"]

# Two or three optimizers, for parts of a model, are common, and their noise does little harm. More
# are needed where the weights are not known to be of one model.
_MANY, _MANY_APART = 4, 8
# A search among all weights for each of more optimizers would take too long.
_SEARCHED = 64

# Engines of optimizers with one weight without a name: the weight's id and the seed.
_single: WeakKeyDictionary[Engine, tuple[int, int]] = WeakKeyDictionary()
_lock = fork_safe_lock()


def warn_if_shared(optimizer: BF16Optimizer, members: Sequence[Member]) -> None:
    """Warn once if many weights have such an optimizer each.

    Args:
        optimizer: an optimizer whose first step is planned.
        members: the members of that plan.
    """
    is_single = sum(len(group["params"]) for group in optimizer.param_groups) == 1
    if not is_single or not members:
        return
    (member,), seed = members, optimizer.recipe.seed
    if not member.weights.stochastic or member.shard.name != "#0":
        return
    with _lock:
        _single[optimizer._engine] = id(member.parameter), seed
        alike = {number for number, other in _single.values() if other == seed}
    if len(alike) < _MANY or (len(alike) > _SEARCHED and len(alike) & (len(alike) - 1)):
        return
    for model in cast_models():
        names = [name for name, each in model.named_parameters() if id(each) in alike]
        if len(names) >= _MANY:
            _warn(type(optimizer).__name__, len(names), f" ({', '.join(names[:3])}, ...)", seed)
            return
    if len(alike) >= _MANY_APART:
        _warn(type(optimizer).__name__, len(alike), "", seed)


def _warn(kind: str, count: int, which: str, seed: int) -> None:
    of_one_model = "" if which else " if they are of one model"
    warn_once(
        f"at least {count} optimizers with one parameter each{which} have no names for them and "
        f"draw the same noise (seed {seed}), so that the roundings of different weights do not "
        f"average out{of_one_model}. Give each its name, {kind}([(name, parameter)]) for name, "
        "parameter in model.named_parameters(), or each recipe a seed of its own, or use one "
        "optimizer and torch_bf16.release_gradients(model, optimizer)",
        key="shared noise",
    )
