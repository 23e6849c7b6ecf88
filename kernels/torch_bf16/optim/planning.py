"""Plans a step: checks the parameters that have a gradient, and completes their states."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_bf16.engine.data_writes import DataWatch
from torch_bf16.engine.member import Member, formats_of
from torch_bf16.engine.plan import Plan
from torch_bf16.engine.states import note_replaced
from torch_bf16.errors import Label, StateMismatchError, prefix_errors
from torch_bf16.model import cast_modules, remainders
from torch_bf16.parameters import parameters_of
from torch_bf16.recipe import get_recipe
from torch_bf16.sharding import Shard, no_torch_function, shard_of, world_size
from torch_bf16.states.completion import keys_of
from torch_bf16.states.home import order_of
from torch_bf16.states.recoding import Changes
from torch_bf16.states.views import MASTERS, planes_of_master

from . import inherited_masters, repeated_noise, shared_noise
from .overview import overview_of
from .overwritten import snapshot_of
from .replaced import check_replaced
from .validation import (
    check_gradient,
    check_parameter,
    check_separate,
    check_unchanged,
)

if TYPE_CHECKING:
    from .optimizer import BF16Optimizer

__all__ = [
    "check_recipe",
    "collect",
    "keep_states",
    "make_plan",
    "name_late_fp32",
    "with_gradients",
]

_logger = logging.getLogger("torch_bf16")


def collect(
    optimizer: BF16Optimizer, parameters: Sequence[Tensor]
) -> list[tuple[Shard, int, Label]]:
    """Check the parameters; returns each one's shard, group number and label, in group order."""
    engine, overview = optimizer._engine, overview_of(optimizer, parameters)
    # With offload, states may be on any device, and are moved to where they belong.
    offloads = optimizer.recipe.offload != "none"
    collected, labels = [], {}
    inherited_masters.keep(optimizer, parameters)
    groups = optimizer.param_groups
    for number, position in overview.places_of(parameters):
        parameter = groups[number]["params"][position]
        labels[parameter] = label = functools.partial(optimizer.label, number, position)
        shard = shard_of(parameter, overview.keys[id(parameter)])
        with prefix_errors(label):
            if snapshot := engine.snapshots.get(parameter):
                state = dict.get(optimizer.state, parameter, {})
                check_unchanged(shard, snapshot, {} if offloads else state)
            check_parameter(shard)
            if parameter.grad is not None:
                check_gradient(shard)
        if (again := overview.again.get(id(parameter))) is not None:
            raise ValueError(
                f"{label()} is also number {again.position} of group {again.group}; remove one"
            )
        collected.append((shard, number, label))
    check_separate((shard for shard, _, _ in collected), labels)
    check_replaced(optimizer.state, labels, overview.orphan)
    return collected


def make_plan(
    optimizer: BF16Optimizer, parameters: Sequence[Tensor], setting: Any, last: Plan | None
) -> Plan:
    """Check the parameters, complete their states, and store these if nothing is wrong.

    Args:
        optimizer: the optimizer that steps.
        parameters: the parameters that have a gradient.
        setting: the current setting, which the plan is valid for.
        last: the last plan, if any; its members that have not changed stay in the new plan, so that
            sets of parameters that alternate are planned only once.
    """
    optimizer.recipe = get_recipe(optimizer.recipe)
    engine, changes = optimizer._engine, Changes()
    kept = {} if last is None else last.intact(setting, optimizer.state)
    for each in parameters:
        kept.pop(each, None)
    steps = _steps_on_host(optimizer.state, [*parameters, *kept])
    members = [
        _make_member(optimizer, shard, number, label, steps, changes)
        for shard, number, label in collect(optimizer, parameters)
    ]
    if engine.release is None:
        remainders.forget(*_check_cast(optimizer, members))
    if last is None:
        shared_noise.warn_if_shared(optimizer, members)
    repeated_noise.warn_if_repeated(optimizer, members)
    overview = overview_of(optimizer)
    if kept:
        for parameter in kept.keys() & steps.keys():
            kept[parameter].state["step"] = steps[parameter]
        members = overview.in_order([*kept.values(), *members])
    # The plan puts its own ``step`` tensors there.
    note_replaced(optimizer.state)
    # Each released step is taken separately; in others, ranks may have gradients that others lack.
    only = None if engine.release is None else [each.parameter for each in members]
    rounds = overview.rounds(optimizer, only)
    summed = overview.sharded(optimizer, lambda rule: rule.statistic is not None, only)
    sharded = [shard for shard, _ in summed]
    plan = Plan(members, optimizer.recipe.seed, optimizer.backend, setting, rounds, sharded)
    plan.compile(optimizer.param_groups)
    engine.pending.get_ready({each.parameter.device for each in members})
    # Only now, so that an error above leaves no incomplete states.
    keep_states(optimizer, members, changes)
    plan.watch(optimizer.state)
    return plan


def _make_member(
    optimizer: BF16Optimizer,
    shard: Shard,
    number: int,
    label: Label,
    steps: Mapping[Tensor, Tensor],
    changes: Changes,
) -> Member:
    """Make the member of a parameter with a gradient; its state is complete, but not stored yet.

    Args:
        optimizer: the optimizer that steps.
        shard: the parameter's shard.
        number: number of its group.
        label: of the parameter, for errors.
        steps: step numbers on the host, of parameters whose device counts them.
        changes: collects what completing the state has changed.
    """
    parameter, group = shard.parameter, optimizer.param_groups[number]
    rule = optimizer.rule_of_parameter(group, parameter)
    state = dict.get(optimizer.state, parameter, {})
    if parameter in steps:
        state = {**state, "step": steps[parameter]}
    had_master = any(isinstance(state.get(key), Tensor) for key in MASTERS)
    if had_master and parameter.dtype == torch.float32:
        _refuse_recast(parameter, label)
    state = optimizer._complete(state, shard, group, label, changes)
    snapshot = snapshot_of(optimizer, shard)
    if not had_master:
        # The state had no part of the weight that an earlier write could have made void.
        snapshot.version = shard.version()
    formats = formats_of(shard, rule, optimizer.recipe)
    dtype = parameter.grad.dtype  # pyright: ignore[reportOptionalMemberAccess]
    keys = tuple(key for key in state if key in keys_of(rule))
    order = order_of(shard, rule, optimizer.recipe)
    member = Member(shard, number, rule, formats, state, keys, dtype, snapshot, order=order)
    if rule.stage_states:
        with prefix_errors(label):
            member.direction, member.steps = optimizer.direction_of(member), int(state["step"])
    return member


def _refuse_recast(parameter: Tensor, label: Label) -> None:
    """Refuse a weight that was recast before its first step, when its state had a part of it.

    Raises:
        StateMismatchError: the fp32 weight is what rounding to bf16 has left of it.
    """
    if id(parameter) in cast_modules.recast_ids():
        raise StateMismatchError(
            f"{label()} was cast to bfloat16, its state has the remainder of its fp32 number, and "
            "it is float32 again, because a module, a hook or the program has recast it. Let the "
            "program keep it in bfloat16 (many have an option for the model's dtype), or put its "
            "name, or its module's, into keep_fp32, which keeps it in float32 from the start"
        )


def check_recipe(optimizer: BF16Optimizer) -> None:
    """Refuse a recipe that does not work with how parameters are sharded.

    Checked when the optimizer is made, where every rank sees every parameter: at a step, FSDP1 may
    leave a rank no part of the parameter that the others refuse.

    Raises:
        NotImplementedError: a parameter is cut within the blocks of one of its formats.
    """
    for group in optimizer.param_groups:
        for shard in map(shard_of, group["params"]):
            if shard.sharded and not shard.can_gather:
                rule = optimizer.rule_of_parameter(group, shard.parameter)
                formats_of(shard, rule, optimizer.recipe)


def with_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parameters that have a gradient."""
    with no_torch_function():
        return [p for p in parameters if p.grad is not None]


def _steps_on_host(states: dict[Tensor, Any], parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Copy step numbers that devices count to the host: fp32, 0-d; one transfer per device."""
    on_device: dict[torch.device, dict[Tensor, Tensor]] = defaultdict(dict)
    for parameter in parameters:
        step = dict.get(states, parameter, {}).get("step")
        if isinstance(step, Tensor) and not step.is_cpu:
            on_device[step.device][parameter] = step.reshape(())
    return {
        parameter: step
        for steps in on_device.values()
        for parameter, step in zip(steps, torch.stack([*steps.values()]).cpu().float(), strict=True)
    }


def keep_states(optimizer: BF16Optimizer, members: Sequence[Any], changes: Changes) -> None:
    """Store the members' states in the optimizer, and warn if completing them has rounded numbers.

    The bits that a cast has cut off their weights are in exact masters now, and are freed.
    """
    if changes.lost:
        _logger.warning("the state went into recipe %r: %s", optimizer.recipe.label, changes)
    _check_reduced(optimizer)
    snapshots = optimizer._engine.snapshots
    for each in members:
        dict.__setitem__(optimizer.state, each.parameter, each.state)
        snapshots[each.parameter] = each.snapshot
        each.snapshot.masters = planes_of_master(each.state)
        each.snapshot.data = DataWatch.of(each.shard, each.state, each.snapshot.data)
    # Not of weights written since: the step first checks whether fp32 weights were loaded.
    intact = (e.shard for e in members if e.snapshot.version == e.shard.version())
    remainders.forget(*intact)
    overview_of(optimizer).tidy(optimizer)


def _check_reduced(optimizer: BF16Optimizer) -> None:
    """Warn once if gradients are not reduced as the recipe asks."""
    engine, way = optimizer._engine, optimizer.recipe.reduce
    if way == "wrapper" or engine.reduction_checked or world_size() == 1:
        return
    engine.reduction_checked = True
    _logger.warning(
        "reduce=%r of recipe %r has no effect yet: call torch_bf16.reduce_gradients(model, "
        "optimizer) with the wrapped model before training",
        *(way, optimizer.recipe.name),
    )


def _check_cast(optimizer: BF16Optimizer, members: Sequence[Member]) -> list[Shard]:
    """Check before the first step that the model was cast as the recipe needs it.

    Returns:
        The parameters that something has made fp32 again since the cast.

    Raises:
        ValueError: it was cast for exact masters, and the recipe keeps none.
    """
    # Complex parameters stay as they are in every cast.
    real = [each for each in members if not each.parameter.is_complex()]
    matrices = [each for each in real if len(each.shard.shape) > 1]
    if not matrices or any(dict.get(optimizer.state, each.parameter) for each in matrices):
        return []
    fp32 = [each.shard for each in members if each.parameter.dtype == torch.float32]
    # Losses with weights of their own cast these to the dtype of their inputs.
    made_fp32 = cast_modules.recast_ids() if fp32 else ()
    recast = [shard for shard in fp32 if id(shard.parameter) in made_fp32]
    alone = [each.shard for each in members if len(each.formats[0].planes) == 1]
    known = remainders.find_remainders(alone)
    dropped = [
        shard
        for shard, each in zip(alone, known, strict=True)
        if each is not None and shard.parameter.dtype != torch.float32
    ]
    if dropped:
        raise ValueError(
            f"the model was cast for exact masters, and recipe {optimizer.recipe.label!r} of the "
            f"optimizer keeps none for {len(dropped)} of its parameters. Give both one recipe: "
            "torch_bf16.prepare(model, optimizer, recipe) does"
        )
    parameters = [each.parameter for each in matrices if id(each.parameter) not in made_fp32]
    kept = cast_modules.kept_ids() if fp32 else ()
    if (
        parameters
        and all(p.dtype == torch.float32 and id(p) not in kept for p in parameters)
        and not any(p.dtype == torch.bfloat16 for p in parameters_of(optimizer))
    ):
        _logger.warning(
            "recipe %r trains float32 parameters only, so that nothing is stored in bf16; call "
            "torch_bf16.cast_model(model, %r) before the first step",
            *(optimizer.recipe.name, optimizer.recipe.name),
        )
    if recast:
        names = ", ".join(repr(shard.name) for shard in recast[:3])
        _logger.warning(
            "parameters that were cast to bfloat16 are float32 again, because a module, or a hook, "
            "has recast them: %s%s. They are trained in float32; to keep them in float32 from the "
            "start, put their names, or their modules', into keep_fp32",
            *(names, ", ..." if len(recast) > 3 else ""),
        )
    return recast


def name_late_fp32(optimizer: BF16Optimizer) -> None:
    """Say that the last group brings fp32 matrices into a training whose other weights are bf16."""
    known = cast_modules.kept_ids() | cast_modules.recast_ids()
    late = [
        each
        for each in optimizer.param_groups[-1]["params"]
        if each.dtype == torch.float32 and each.ndim > 1 and id(each) not in known
    ]
    trained = (each for each in dict.keys(optimizer.state) if isinstance(each, Tensor))
    if late and any(each.dtype == torch.bfloat16 for each in trained):
        _logger.warning(
            "a parameter group with %d float32 matrices, the first of shape %s, joins bfloat16 "
            "weights that are trained by recipe %r: it stays float32, as do its states. To store "
            "it by the recipe, too, call torch_bf16.cast_model(layer, recipe) before "
            "add_param_group",
            *(len(late), tuple(late[0].shape), optimizer.recipe.name),
        )
