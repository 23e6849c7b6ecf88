"""Drops the remainders of weights that something else has written, which makes them void.

If fp32 weights were loaded, their remainders take the place of the old ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from torch_bf16.backends import cuda_graphs
from torch_bf16.engine import data_writes
from torch_bf16.engine.data_writes import REMAINDERS, DataWatch
from torch_bf16.engine.states import States
from torch_bf16.engine.versions import Snapshot
from torch_bf16.engine.write_history import Counted
from torch_bf16.errors import warn
from torch_bf16.formats import Format
from torch_bf16.model import remainders
from torch_bf16.sharding import Shard, local, shard_of
from torch_bf16.states.views import MASTERS, planes_of_master

if TYPE_CHECKING:
    from .optimizer import BF16Optimizer

__all__ = [
    "drop_remainders",
    "look_for_writes",
    "snapshot_of",
    "states_without_remainders",
    "without_remainders",
]


class _Written(Protocol):
    @property
    def shard(self) -> Shard: ...
    @property
    def state(self) -> dict[str, Any]: ...
    @property
    def snapshot(self) -> Snapshot: ...
    @property
    def weights(self) -> Format: ...


def drop_remainders(
    optimizer: BF16Optimizer,
    parameters: Sequence[Tensor],
    written: Callable[[], Sequence[_Written]],
) -> bool:
    """Drop the remainders of weights that something else has written since the last step.

    Args:
        optimizer: the optimizer, whose states are written.
        parameters: the parameters that are about to take a step.
        written: returns the members whose weight has another version than the last step left.
            Called only after writes that are known number by number, such as those through
            ``.data``, were handled: they no longer count.

    Returns:
        Whether ``written()`` returned any members.

    Raises:
        RuntimeError: a CUDA graph is being captured, whose replays would compare each time.
    """
    _drop_number_by_number(optimizer, parameters)
    members = written()
    if not members:
        return False
    _warn_of_second_master(optimizer, _shared(optimizer, [each.shard for each in members]))
    for each in members:
        planes = each.weights.plane_names("")[1:]
        loaded = [_replace(local(each.state[key]), each.shard, key) for key in planes]
        # Right away, because this step may fail, and the next one must not see another write.
        each.snapshot.version = each.shard.version()
        if (watch := each.snapshot.data) is not None:
            if not any(loaded):
                watch.follow_writes()
            # The bytes that it saved belong to the old numbers.
            watch.note_step()
    remainders.forget(*(each.shard for each in members))
    optimizer._engine.writes.note(optimizer._engine.steps)
    return True


def without_remainders(
    optimizer: BF16Optimizer, shard: Shard, state: Mapping[str, Any]
) -> dict[str, Any]:
    """A copy of a parameter's state, without remainders that are void because of later writes.

    Args:
        optimizer: the optimizer.
        shard: the parameter's shard.
        state: the parameter's state; not changed.
    """
    valid, snapshot = dict(state), snapshot_of(optimizer, shard)
    watch = snapshot.data
    if (
        watch is not None
        and watch.knows(snapshot.version)
        and remainders.second_plane(shard, torch.int16) is None
    ):
        if (changed := watch.changed()) is not None:
            for key in REMAINDERS & state.keys():
                plane = local(state[key])
                # A moved parameter has left its state behind.
                valid[key] = shard.place(plane.masked_fill(changed.to(plane.device), 0))
    elif snapshot.version != shard.version():
        for key in state.keys() & MASTERS:
            plane = local(state[key]).clone()
            _replace(plane, shard, key)
            valid[key] = shard.place(plane)
    return valid


def snapshot_of(optimizer: BF16Optimizer, shard: Shard) -> Snapshot:
    """A parameter as the last step left it; before its first one, as it is now.

    But if fp32 weights were loaded after its state, as the state found it: they replace its master.
    Weights that bf16 holds do not, also as fp32 tensors: they are those that it was saved with.
    """
    engine = optimizer._engine
    if (snapshot := engine.snapshots.get(shard.parameter)) is None:
        snapshot = Snapshot.of(shard)
        version, has_master = engine.version_left(shard.parameter)
        if version is not None and has_master and remainders.loaded_since(shard, version):
            snapshot.version = version
    return snapshot


def states_without_remainders(optimizer: BF16Optimizer) -> States:
    """All states without void remainders: a copy of the optimizer cannot know of earlier writes."""
    states = States(dict)
    for key, state in dict.items(optimizer.state):
        if isinstance(key, Tensor):
            state = without_remainders(optimizer, shard_of(key), state)
        dict.__setitem__(states, key, state)
    states.seen = getattr(optimizer.state, "seen", True)
    return states


def look_for_writes(optimizer: BF16Optimizer) -> None:
    """Let a copy's states belong to the weights as they are now: later writes make them void."""
    shards = [shard_of(each) for each in dict.keys(optimizer.state) if isinstance(each, Tensor)]
    for shard in shards:
        snapshot = optimizer._engine.snapshots[shard.parameter] = Snapshot.of(shard)
        state = dict.get(optimizer.state, shard.parameter, {})
        snapshot.masters, snapshot.data = planes_of_master(state), DataWatch.of(shard, state)


def _replace(plane: Tensor, shard: Shard, key: str) -> bool:
    """Replace a master's second plane by that of fp32 weights that were loaded, or else drop it.

    Returns:
        Whether fp32 weights were loaded.
    """
    loaded = remainders.second_plane(shard, plane.dtype)
    if loaded is not None:
        plane.copy_(loaded)
    elif key in REMAINDERS:
        # Only remainders: whether a whole master is stale shows in its numbers.
        plane.zero_()
    return loaded is not None


def _shared(optimizer: BF16Optimizer, written: Sequence[Shard]) -> list[Shard]:
    """Those that another optimizer has stepped last; none once that was warned of."""
    engine = optimizer._engine
    if engine.writes.warned_of_second_master:
        return []
    return [each for each in written if engine.stepped_by_another(each)]


def _warn_of_second_master(optimizer: BF16Optimizer, shared: Sequence[Shard]) -> None:
    writes = optimizer._engine.writes
    if shared and not writes.warned_of_second_master:
        writes.warned_of_second_master = True
        warn(
            f"another optimizer has stepped {len(shared)} of the parameters of this "
            f"{type(optimizer).__name__}, the first of shape {tuple(shared[0].parameter.shape)}, "
            "and both keep exact fp32 masters: what one master has beyond bf16 is dropped where "
            "the other changes a weight, so that small updates can be lost. Train each parameter "
            "by one optimizer, or leave these in fp32 by keep_fp32=('part_that_both_train.*',) "
            "(this warning appears only once)",
        )


def _drop_number_by_number(optimizer: BF16Optimizer, parameters: Sequence[Tensor]) -> None:
    writes = optimizer._engine.writes
    touched = data_writes.touched(optimizer._engine.watches(parameters))
    if not (touched or writes.unread):
        return
    if cuda_graphs.capturing(each.device for each in parameters):
        if not touched:
            return
        raise RuntimeError(
            f"a step of {type(optimizer).__name__} cannot be captured in a CUDA graph: its weights "
            "were written, or their .data was read, since the last step, and replays would "
            "look for writes each time; take an ordinary step first"
        )
    if touched:
        _drop_written(optimizer, parameters)
    # On a GPU they may be those of an earlier step: the host does not wait for them.
    while writes.unread and writes.unread[0].counting.is_done:
        counted = writes.unread.popleft()
        if not writes.warned:
            _warn_of_writes(optimizer, counted)


def _drop_written(optimizer: BF16Optimizer, parameters: Sequence[Tensor]) -> None:
    engine, shards = optimizer._engine, [*map(shard_of, parameters)]
    writes, step = engine.writes, engine.steps
    # If fp32 weights were loaded last, their remainders take the place of the old ones.
    remainders.forget_written(shards)
    loaded = remainders.find_remainders(shards)
    parameters = [p for p, each in zip(parameters, loaded, strict=True) if each is None]
    rare, counts_in_place = writes.is_rare(step), writes.is_observed(step)
    raised, counting = data_writes.zero_written(
        parameters,
        optimizer.state,
        engine.snapshots,
        count=not writes.warned,
        count_in_place=counts_in_place,
    )
    if raised:
        writes.note(step)
    # Now: by the time that the counts are known, this optimizer has stepped them last.
    shared = _shared(optimizer, shards) if raised and counts_in_place else []
    writes.unread.append(Counted(step, rare, shared, counting))


def _warn_of_writes(optimizer: BF16Optimizer, counted: Counted) -> None:
    """Count a step before which weights were written; warn if that loses what masters have."""
    written = counted.counting.read()
    if written.in_place:
        _warn_of_second_master(optimizer, counted.shared)
    if optimizer._engine.writes.add(counted, written):
        how = (
            f"bf16 weights, {written.through_data} in all, were written through p.data between two "
            "steps"
            if written.through_data
            else f"bf16 weights, {written.in_place} in all, were written in place before a step, "
            "and before earlier ones"
        )
        warn(
            f"{how}: where their numbers changed, training continues from the bf16 numbers, not "
            "from an fp32 master. To average or blend weights, compute with fp32 ones: with "
            "torch_bf16.exact_weights(model, optimizer) as weights: ... To go back to earlier "
            "weights, load torch_bf16.fp32_state_dict(model, optimizer) of then (this warning "
            "appears only once)",
        )
