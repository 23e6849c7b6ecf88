"""Exact masters that outlive the states they were in: they are parts of the weights.

A second training of the same weights, with an optimizer of its own, would otherwise start from the
bf16 numbers, and many short trainings at a small learning rate would hardly move. So would a
training whose states are reset now and then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from torch_bf16.backends import fetch
from torch_bf16.engine.engine import begun_optimizers
from torch_bf16.model import remainders
from torch_bf16.parameters import parameters_of
from torch_bf16.sharding import Shard, shard_of
from torch_bf16.states.recoding import stored_format
from torch_bf16.states.views import MASTERS, masters_in

from .overwritten import without_remainders

if TYPE_CHECKING:
    from .optimizer import BF16Optimizer

__all__ = ["inherit", "keep", "register"]


def inherit(optimizer: BF16Optimizer) -> None:
    """Let a new optimizer start from the exact masters that a living one has of its parameters.

    They are copied, and wait for the first step as the bits do that a cast drops.
    """
    optimizer._engine.optimizer = ref(optimizer)
    others, planes = begun_optimizers(), {}
    own = set(parameters_of(optimizer)) if others else set()
    waiting = _waiting(optimizer, own) if others else set()
    for other in others:
        # Bits that a cast has left are older than a master that was loaded since. Of two sets this
        # goes through the smaller one: making many optimizers stays cheap.
        loaded = other._engine.loaded.keys() & own
        candidates = waiting.union(_with_master(optimizer, loaded)) if loaded else waiting
        # Most of many optimizers, such as one for each parameter, have none of these.
        for parameter in dict.keys(other.state) & candidates:
            state = dict.get(other.state, parameter, {})
            if _is_last(other, parameter) and _has_master(state):
                waiting.discard(parameter)
                planes[parameter] = other, state
    _remember(planes)


def keep(optimizer: BF16Optimizer, parameters: Iterable[Tensor]) -> None:
    """Let the masters of states that were reset, or taken away, since the last step outlive them.

    Called before states get masters: later optimizers inherit from this one.

    Args:
        optimizer: the optimizer.
        parameters: those whose states count.
    """
    optimizer._engine.begin()
    snapshots, lost = optimizer._engine.snapshots, {}
    for each in parameters:
        snapshot = snapshots.get(each)
        if snapshot is None or _has_master(dict.get(optimizer.state, each, {})):
            continue
        if snapshot.masters:
            lost[each] = optimizer, snapshot.masters
        snapshot.masters = {}
    if lost:
        waiting = _waiting(optimizer, lost)
        _remember({p: each for p, each in lost.items() if p in waiting})


def register(optimizer: BF16Optimizer) -> None:
    """Let later optimizers inherit masters from one that is a copy or unpickled."""
    optimizer._engine.optimizer = ref(optimizer)
    optimizer._engine.begin()


def _has_master(state: Any) -> bool:
    return isinstance(state, Mapping) and not MASTERS.isdisjoint(state)


def _is_last(optimizer: BF16Optimizer, parameter: Tensor) -> bool:
    """Whether nothing has written a weight since the optimizer has stepped or loaded it."""
    return optimizer._engine.version_left(parameter)[0] == shard_of(parameter).version()


def _waiting(optimizer: BF16Optimizer, parameters: Iterable[Tensor]) -> set[Tensor]:
    """The parameters that get an exact master whose bits are not known otherwise."""
    shards = _with_master(optimizer, parameters)
    found = remainders.find_unwritten([*shards.values()])
    return {each for each, known in zip(shards, found, strict=True) if known is None}


def _with_master(optimizer: BF16Optimizer, parameters: Iterable[Tensor]) -> dict[Tensor, Shard]:
    """The parameters that get an exact master, with their shards."""
    shards = {p: shard_of(p) for p in parameters if p.dtype == torch.bfloat16}
    of = optimizer.recipe.format_of
    return {p: s for p, s in shards.items() if len(of("weights", s.shape, p.dtype).planes) > 1}


def _remember(states: Mapping[Tensor, tuple[BF16Optimizer, Mapping[str, Any]]]) -> None:
    """Remember the masters in these states, each of which belongs to an optimizer."""
    planes: dict[int, tuple[Any, dict[Tensor, Tensor]]] = {}
    for parameter, (optimizer, state) in states.items():
        shard, model = shard_of(parameter), optimizer._engine.model()
        valid = without_remainders(optimizer, shard, state)
        masters = masters_in(valid)
        for plane in masters.values():
            visible = shard.memory.contiguous()
            (kept,) = fetch([plane], visible.device)
            # Whether a whole master is stale shows only in its numbers.
            format_ = stored_format(masters, "") if plane.is_floating_point() else None
            kept = kept.detach().clone() if format_ is None else format_.decode([visible, kept])
            # The copy waits where the master will be.
            planes.setdefault(id(model), (model, {}))[1][parameter] = kept.to(plane.device)
    remainders.forget(*map(shard_of, states))
    # Each call walks the whole model.
    for model, of_model in planes.values():
        remainders.remember_planes(of_model, model)
