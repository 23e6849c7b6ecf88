"""Saves our optimizers: torch's state dicts, without losing a bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torch_bf16.engine.states import holds_host_memory, set_seen
from torch_bf16.model import remainders
from torch_bf16.parameters import parameters_of
from torch_bf16.sharding import any_flattened, shard_of, unit_of
from torch_bf16.states import schema
from torch_bf16.states.recoding import Changes
from torch_bf16.states.views import (
    MASTERS,
    gatherable,
    planes_of_master,
    to_view,
)

from . import inherited_masters
from .broadcast_states import watch_broadcasts
from .overwritten import without_remainders

if TYPE_CHECKING:
    from .optimizer import BF16Optimizer

__all__ = ["save"]


def save(optimizer: BF16Optimizer, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Make a state dict by torch's own method, with a header, and with bits shown as numbers."""
    was_seen = True
    # It asks for a state dict before it sends one.
    watch_broadcasts()

    def before(_: Any) -> None:
        nonlocal was_seen
        was_seen = getattr(optimizer.state, "seen", True)
        inherited_masters.keep(optimizer, parameters_of(optimizer))

    def show(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        view = _show(optimizer, state_dict)
        # torch's method has read the states, but only other tensors over the same memory are
        # handed out. A queue of torch.multiprocessing, or share_memory_(), moves that on CPUs.
        set_seen(optimizer.state, was_seen or holds_host_memory(view["state"].values()))
        return view

    engine = optimizer._engine
    with engine.state_dicts:
        # After the user's pre-hooks, and before the user's post-hooks, which see what is saved.
        hooks = [
            optimizer.register_state_dict_pre_hook(before),
            optimizer.register_state_dict_post_hook(show, prepend=True),
        ]
        try:
            complete = state_dict()
        finally:
            for hook in hooks:
                hook.remove()
    engine.name_parameters(parameters_of(optimizer))
    names = engine.names.known(optimizer.param_groups)
    norm = None if engine.last_norm is None else engine.last_norm.item()
    watches = [each.data for each in engine.snapshots.values() if each.data is not None]
    written = any(each.expects_writes for each in watches)
    complete[schema.HEADER] = schema.header(
        optimizer.recipe, names, norm, written, optimizer.family
    )
    return complete


def _show(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    states, in_units = dict(state_dict["state"]), _names_in_units(optimizer)
    for number, saved_group in enumerate(state_dict["param_groups"]):
        group = optimizer.param_groups[number]
        for position, key in enumerate(saved_group["params"]):
            parameter = group["params"][position]
            flattened = any_flattened([parameter])
            if key in states:
                state = states[key]
                if not MASTERS.isdisjoint(state):
                    state = without_remainders(optimizer, shard_of(parameter), state)
                if flattened:
                    states[key] = gatherable(state, parameter, *in_units[parameter])
                else:
                    states[key] = to_view(state)
            elif not flattened and remainders.find_remainder(shard := shard_of(parameter)):
                # Before the first step: the bits that the cast took are stored nowhere else.
                label = functools.partial(optimizer.label, number, position)
                state = optimizer._complete({}, shard, group, label, Changes())
                if not parameter.requires_grad:
                    # A frozen base would pay for moments, also in memory once they are loaded.
                    state = planes_of_master(state)
                states[key] = to_view(state)
    return {**state_dict, "state": {k: _aliases(each) for k, each in states.items()}}


def _names_in_units(optimizer: BF16Optimizer) -> dict[Tensor, tuple[set[str], set[str]]]:
    """For each parameter with a state that FSDP1 has flattened, what its whole unit keeps.

    These are the names of the states of rules, and of the planes beside weights.
    """
    groups = {each: group for group in optimizer.param_groups for each in group["params"]}
    found: dict[Tensor, tuple[set[str], set[str]]] = {}
    for parameter in dict.keys(optimizer.state):
        if parameter in found or not any_flattened([parameter]):
            continue
        unit = unit_of(parameter)
        rules = {optimizer.rule_of_parameter(groups[p], p) for p in unit if p in groups}
        names = {state.name for rule in rules for state in (*rule.states, *rule.stage_states)}
        formats = {optimizer.recipe.format_of("weights", shape) for shape in unit.values()}
        planes = {name for each in formats for name in each.plane_names("")[1:]}
        found.update(dict.fromkeys(unit, (names, planes)))
    return found


def _aliases(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return {k: v.detach() if isinstance(v, Tensor) else v for k, v in state.items()}
