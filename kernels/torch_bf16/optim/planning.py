"""Planning a step: the parameters that take part are checked, and their states are made."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bf16.engine.data_writes import DataWatch
from torch_bf16.engine.member import Member, formats_of
from torch_bf16.engine.ownership import Round, rounds_of
from torch_bf16.engine.plan import Plan
from torch_bf16.engine.states import States
from torch_bf16.engine.versions import Snapshot
from torch_bf16.errors import UNTOUCHED, Label, StateMismatchError, prefix_errors
from torch_bf16.model import remainders
from torch_bf16.model.casting import is_kept_fp32
from torch_bf16.recipe import get_recipe
from torch_bf16.rules import STORE, Rule
from torch_bf16.sharding import Shard, no_torch_function, shard_of
from torch_bf16.states.completion import keys_of
from torch_bf16.states.recoding import Changes
from torch_bf16.states.views import MASTERS

from .validation import (
    check_gradient,
    check_parameter,
    check_replaced,
    check_separate,
    check_unchanged,
)

if TYPE_CHECKING:
    from .optimizer import BF16Optimizer

__all__ = [
    "check_in_model",
    "check_recipe",
    "collect",
    "keep_states",
    "make_plan",
    "with_gradients",
]

_logger = logging.getLogger("torch_bf16")


def collect(
    optimizer: BF16Optimizer, parameters: Sequence[Tensor]
) -> list[tuple[Shard, int, Label]]:
    """Shard, number of the group and label of all that takes part, checked."""
    taking_part, engine = set(parameters), optimizer._engine
    # Then states may be anywhere, and are brought home.
    offloads = optimizer.recipe.offload != "none"
    found, labels, before = [], {}, 0
    groups = optimizer.param_groups
    for number, group in enumerate(groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in taking_part:
                continue
            if parameter in labels:
                raise ValueError("a parameter is in the groups twice; remove one")
            labels[parameter] = label = functools.partial(optimizer.label, number, position)
            shard = shard_of(parameter, engine.names.key(groups, number, position, before))
            with prefix_errors(label):
                if snapshot := engine.snapshots.get(parameter):
                    state = dict.get(optimizer.state, parameter, {})
                    check_unchanged(shard, snapshot, {} if offloads else state)
                check_parameter(shard)
                if parameter.grad is not None:
                    check_gradient(shard)
            found.append((shard, number, label))
        before += len(group["params"])
    check_separate((shard for shard, _, _ in found), labels)
    check_replaced(optimizer, labels)
    return found


def make_plan(
    optimizer: BF16Optimizer, parameters: Sequence[Tensor], setting: Any, last: Plan | None = None
) -> Plan:
    """Check all that takes part, complete its states, and keep these if nothing is wrong.

    Args:
        optimizer: whose plan it is.
        parameters: all that takes part.
        setting: what else the plan follows from.
        last: a plan whose members stay, as far as nothing of them has changed: so a set of
            parameters that comes and goes is planned for once.
    """
    optimizer.recipe = get_recipe(optimizer.recipe)
    engine, members, changes = optimizer._engine, [], Changes()
    beside = {} if last is None else last.intact(setting, optimizer.state)
    for each in parameters:
        beside.pop(each, None)
    steps = _steps_on_host(optimizer.state, [*parameters, *beside])
    for shard, number, label in collect(optimizer, parameters):
        group, parameter = optimizer.param_groups[number], shard.parameter
        rule = optimizer.rule_of_parameter(group, parameter)
        state = dict.get(optimizer.state, parameter, {})
        if parameter in steps:
            state = {**state, "step": steps[parameter]}
        has_master = any(isinstance(state.get(key), Tensor) for key in MASTERS)
        state = optimizer._complete(state, shard, group, label, changes)
        snapshot = engine.snapshots.get(parameter) or Snapshot.of(shard)
        if not has_master:
            # Versions are followed for what belongs to one weight and to no other.
            snapshot.version = shard.version()
        formats = formats_of(shard, rule, optimizer.recipe)
        dtype = parameter.grad.dtype  # pyright: ignore[reportOptionalMemberAccess]
        keys = tuple(key for key in state if key in keys_of(rule))
        member = Member(shard, number, rule, formats, state, keys, dtype, snapshot)
        if rule.stage_states:
            with prefix_errors(label):
                member.direction, member.steps = optimizer.direction_of(member), int(state["step"])
        members.append(member)
    if engine.release is None:
        _check_cast(optimizer, members)
    if beside:
        for parameter in beside.keys() & steps.keys():
            beside[parameter].state["step"] = steps[parameter]
        known = beside | {each.parameter: each for each in members}
        ordered = (p for group in optimizer.param_groups for p in group["params"])
        members = [known[p] for p in ordered if p in known]
    if isinstance(optimizer.state, States):
        optimizer.state.plans += 1
    rounds, sharded = _rounds(optimizer), _summed(optimizer, members)
    plan = Plan(members, optimizer.recipe.seed, optimizer.backend, setting, rounds, sharded)
    plan.compile(optimizer.param_groups)
    engine.pending.get_ready({each.parameter.device for each in members})
    # Only now, so that an error above leaves no half-made states.
    keep_states(optimizer, members, changes)
    plan.watch(optimizer.state)
    return plan


def _rounds(optimizer: BF16Optimizer) -> list[Round]:
    """In which ranks exchange what rules look at as a whole: of all parameters that there are."""
    return rounds_of([*_in_parts(optimizer, lambda rule: bool(rule.stage_states))])


def _summed(optimizer: BF16Optimizer, members: Sequence[Member]) -> list[Shard]:
    """What ranks sum the statistics of together: of all parameters that there are, likewise.

    But of those that take part alone where gradients are released: their steps are taken at times
    of their own.
    """
    only = None if optimizer._engine.release is None else {each.parameter for each in members}
    found = _in_parts(optimizer, lambda rule: rule.statistic is not None, only)
    return [shard for shard, _ in found]


def _in_parts(
    optimizer: BF16Optimizer, looks: Callable[[Rule], bool], only: Container[Tensor] | None = None
) -> Iterator[tuple[Shard, Rule]]:
    """What ranks hold parts of, of rules that look at whole tensors.

    Also where it has no gradient here: FSDP1 leaves some ranks nothing of a parameter, and none.
    """
    for number, group in enumerate(optimizer.param_groups):
        looking = looks(optimizer.rule_of_group(group))
        for position, parameter in enumerate(group["params"] if looking else ()):
            if only is not None and parameter not in only:
                continue
            shard = shard_of(parameter)
            if shard.sharded:
                with prefix_errors(functools.partial(optimizer.label, number, position)):
                    shard.holders()
                yield shard, optimizer.rule_of_parameter(group, parameter)


def check_recipe(optimizer: BF16Optimizer) -> None:
    """Refuse a recipe whose blocks would be cut, where every rank sees every parameter.

    FSDP1 leaves some ranks nothing of a parameter that they could refuse to step. And one that
    offloads states of which no kernel knows.

    Raises:
        NotImplementedError: a parameter is cut within the blocks of one of its formats, or the
            class takes steps of its own on states in host memory.
    """
    rules = [optimizer.rule_of_group(group) for group in optimizer.param_groups]
    if optimizer.recipe.offload != "none" and STORE in rules:
        raise NotImplementedError(
            f"offload={optimizer.recipe.offload!r} is for optimizers with a fused rule, and "
            f"{type(optimizer).__name__} takes steps of its own on fp32 copies. Leave offload out, "
            "or use an optimizer of torch_bf16"
        )
    for group in optimizer.param_groups:
        for shard in map(shard_of, group["params"]):
            if shard.sharded and not shard.can_gather:
                rule = optimizer.rule_of_parameter(group, shard.parameter)
                formats_of(shard, rule, optimizer.recipe)


def with_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those of some parameters that have a gradient."""
    with no_torch_function():
        return [p for p in parameters if p.grad is not None]


def _steps_on_host(states: dict[Tensor, Any], parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """The steps that devices count, fp32, 0-d; all of a device at once, as reading one waits."""
    found: dict[torch.device, dict[Tensor, Tensor]] = defaultdict(dict)
    for parameter in parameters:
        step = dict.get(states, parameter, {}).get("step")
        if isinstance(step, Tensor) and not step.is_cpu:
            found[step.device][parameter] = step.reshape(())
    return {
        parameter: step
        for steps in found.values()
        for parameter, step in zip(steps, torch.stack([*steps.values()]).cpu().float(), strict=True)
    }


def keep_states(optimizer: BF16Optimizer, members: Sequence[Any], changes: Changes) -> None:
    """Put the members' states into the optimizer, and warn of what making them has rounded.

    The bits that a cast cut off their weights are in exact masters now, and are freed.
    """
    if changes.lost:
        _logger.warning("the state went into recipe %r: %s", optimizer.recipe.name, changes)
    _check_reduced(optimizer)
    snapshots = optimizer._engine.snapshots
    for each in members:
        dict.__setitem__(optimizer.state, each.parameter, each.state)
        snapshots[each.parameter] = each.snapshot
        each.snapshot.data = DataWatch.of(each.shard, each.state, each.snapshot.data)
    # Of what something else has written, the step asks first whether fp32 weights were loaded.
    intact = (e.shard for e in members if e.snapshot.version == e.shard.version())
    remainders.forget(*intact)
    every = [p for group in optimizer.param_groups for p in group["params"]]
    remainders.forget_empty(every)
    # A snapshot keeps its parameter alive. Hosts show groups in turn: states outlast that.
    known = {*map(id, every), *map(id, optimizer.state)}
    for parameter in [p for p in snapshots if id(p) not in known]:
        del snapshots[parameter]


def check_in_model(optimizer: BF16Optimizer) -> None:
    """Refuse a step without gradients where all are of parameters that have replaced its own.

    Args:
        optimizer: none of its parameters takes part in the step.

    Raises:
        StateMismatchError: they are, so that nothing would be trained.
    """
    model = optimizer._engine.model()
    if model is None:
        return
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = [*model.parameters()]
    if own.isdisjoint(map(id, parameters)) and with_gradients(parameters):
        raise StateMismatchError(
            f"no parameter of this {type(optimizer).__name__} has a gradient, and none is one of "
            f"the {type(model).__name__}'s any more, which have: they were replaced, as "
            "fully_shard does, and no step would train the new ones. Make the optimizer of them, "
            f"and call prepare() or convert() after fully_shard(). {UNTOUCHED}"
        )


def _check_reduced(optimizer: BF16Optimizer) -> None:
    """Warn once if gradients are not reduced as the recipe asks."""
    engine, way = optimizer._engine, optimizer.recipe.reduce
    if (
        way == "wrapper"
        or engine.reduction_checked
        or not (dist.is_available() and dist.is_initialized())
    ):
        return
    engine.reduction_checked = True
    if dist.get_world_size() > 1:
        _logger.warning(
            "reduce=%r of recipe %r has no effect yet: call torch_bf16.reduce_gradients(model, "
            "optimizer) with the wrapped model before training",
            *(way, optimizer.recipe.name),
        )


def _check_cast(optimizer: BF16Optimizer, members: Sequence[Member]) -> None:
    """Before the first step, compare how the model was cast with the recipe.

    Raises:
        ValueError: it was cast for exact masters, and the recipe keeps none.
    """
    matrices = [each for each in members if len(each.shard.shape) > 1]
    if not matrices or any(dict.get(optimizer.state, each.parameter) for each in matrices):
        return
    parameters = [each.parameter for each in matrices]
    if all(p.dtype == torch.float32 and not is_kept_fp32(p) for p in parameters):
        _logger.warning(
            "recipe %r trains float32 parameters only, so that nothing is stored in bf16; call "
            "torch_bf16.cast_model(model, %r) before the first step",
            *(optimizer.recipe.name, optimizer.recipe.name),
        )
    alone = [each.shard for each in members if len(each.formats[0].planes) == 1]
    known = remainders.find_remainders(alone)
    dropped = [shard for shard, each in zip(alone, known, strict=True) if each is not None]
    recast = [shard for shard in dropped if shard.parameter.dtype == torch.float32]
    if len(dropped) > len(recast):
        raise ValueError(
            f"the model was cast for exact masters, and recipe {optimizer.recipe.name!r} of the "
            f"optimizer keeps none for {len(dropped) - len(recast)} of its parameters. Give both "
            "one recipe: torch_bf16.prepare(model, optimizer, recipe) does"
        )
    for shard in recast:
        # Losses with weights of their own put these into the dtype of what they are given.
        remainders.forget(shard)
        _logger.warning(
            "parameter %r was cast to bfloat16 and is float32 again: its module, or a hook, has "
            "recast it. It is trained in float32; keep_fp32 with its name, or its module's, has "
            "it so from the start",
            shard.name,
        )
