"""Exact masters of a new optimizer that start where those of an earlier one are.

A second training of the same weights, with an optimizer of its own, would else start from the bf16
numbers, and many short trainings at a small learning rate would hardly move.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor

from torch_bf16.model import remainders
from torch_bf16.parameters import parameters_of
from torch_bf16.sharding import local, shard_of
from torch_bf16.states.views import MASTERS

if TYPE_CHECKING:
    from .optimizer import BF16Optimizer

__all__ = ["inherit", "register"]

_optimizers: WeakSet[BF16Optimizer] = WeakSet()
_lock = threading.Lock()


def inherit(optimizer: BF16Optimizer) -> None:
    """Let a new optimizer start from the exact masters that a living one has of its parameters.

    They are copied, and wait for the first step as the bits do that a cast drops.
    """
    others = register(optimizer)
    if not others:
        return
    parameters = [p for p in parameters_of(optimizer) if p.dtype == torch.bfloat16]
    shards = [*map(shard_of, parameters)]
    remainders.forget_written(shards)
    known = remainders.find_remainders(shards)
    waiting = {p for p, each in zip(parameters, known, strict=True) if each is None}
    found: dict[int, tuple[Any, dict[Tensor, Any]]] = {}
    for other in others:
        # Most of many optimizers, such as one for each parameter, have none of these.
        for parameter in dict.keys(other.state) & waiting:
            if (master := _master(optimizer, other, parameter)) is not None:
                model = other._engine.model()
                found.setdefault(id(model), (model, {}))[1][parameter] = master
                waiting.discard(parameter)
    # Each call walks the whole model.
    for model, masters in found.values():
        remainders.remember_masters(masters, model)


def register(optimizer: BF16Optimizer) -> list[BF16Optimizer]:
    """Let later optimizers inherit masters from one that is new, a copy or unpickled.

    Returns:
        The other optimizers that live.
    """
    with _lock:
        others = [each for each in _optimizers if each is not optimizer]
        _optimizers.add(optimizer)
    return others


def _master(
    optimizer: BF16Optimizer, other: BF16Optimizer, parameter: Tensor
) -> tuple[Tensor, torch.dtype] | None:
    """This rank's part of the fp32 numbers that ``other`` has of a weight, if they are its last.

    Also the dtype of the plane that ``optimizer`` will keep beside the weight.
    """
    shard, engine = shard_of(parameter), other._engine
    format_ = optimizer.recipe.format_of("weights", shard.shape, parameter.dtype)
    snapshot = engine.snapshots.get(parameter)
    version = engine.loaded.get(parameter) if snapshot is None else snapshot.version
    if len(format_.planes) == 1 or version != shard.version():
        return None
    has_one = not MASTERS.isdisjoint(dict.get(other.state, parameter, {}))
    return (local(other.exact_weight(parameter)), format_.planes[1].dtype) if has_one else None
