"""Loads our optimizers from state dicts of torch, of ours and of other recipes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_bf16.engine.data_writes import DataWatch
from torch_bf16.engine.states import set_seen
from torch_bf16.engine.versions import Snapshot
from torch_bf16.errors import StateMismatchError, prefix_errors, suffix_errors
from torch_bf16.model import remainders
from torch_bf16.parameters import parameters_of
from torch_bf16.recipe import label_of
from torch_bf16.rules import FIRST_MOMENT, SECOND_MOMENT, STORE
from torch_bf16.sharding import any_flattened, bare_name, same_memory, shard_of
from torch_bf16.states import schema
from torch_bf16.states.completion import keys_of
from torch_bf16.states.recoding import Changes, restored_remainders, without_stale_remainders
from torch_bf16.states.views import (
    MASTERS,
    from_view,
    is_stand_in,
    planes_of_master,
    to_view,
)

from . import inherited_masters
from .renamed import tell_of_other_noise
from .validation import FULLY_DECOUPLED, resolve_peak_lr
from .variants import VARIANTS

if TYPE_CHECKING:
    from .optimizer import BF16Optimizer

__all__ = ["check", "check_groups", "load", "read_placed"]

# A host may have loaded the model's weights by now.
_UNCHANGED = "No state was changed"

# Options of parameter groups that no class of torch has.
_OURS = (*VARIANTS, FULLY_DECOUPLED)
_DECOUPLED = "decoupled_weight_decay"

_logger = logging.getLogger("torch_bf16")


def load(
    optimizer: BF16Optimizer, state_dict: dict[str, Any], load_state_dict: Callable[[Any], None]
) -> None:
    """Load a state dict by torch's own method, but keep it from casting states."""
    loading = _Loading(optimizer)
    with optimizer._engine.state_dicts:
        # After the user's pre-hooks and before the user's post-hooks.
        hooks = [
            optimizer.register_load_state_dict_pre_hook(loading.take),
            optimizer.register_load_state_dict_post_hook(loading.put, prepend=True),
        ]
        try:
            with loading.unchanged:
                if not isinstance(state_dict, dict):
                    schema.check_state_dict(state_dict)  # which raises
                before = optimizer.state, optimizer.param_groups
                load_state_dict(state_dict)
                if not loading.hooked:
                    try:
                        loading.take_placed(state_dict)
                    except Exception:
                        optimizer.state, optimizer.param_groups = before
                        raise
                _put_back(optimizer, loading.exact)
        finally:
            for hook in hooks:
                hook.remove()


def read_placed(optimizer: BF16Optimizer, groups: list[dict[str, Any]]) -> None:
    """Read saved states that were put into an optimizer past its ``load_state_dict``.

    Args:
        optimizer: the optimizer, with states as they were saved, or its own.
        groups: the options that belong to these states, of each of its groups.
    """
    loading = _Loading(optimizer)
    loading.read_placed(groups)
    loading.put(None)


class _Loading:
    """A state dict that passes through torch's method without its states, which torch would cast.

    Attributes:
        hooked: whether :meth:`take` was called; some classes load by themselves.
        exact: the states as they were put into the optimizer.
        unchanged: ends errors by saying that nothing was changed, for as long as that is true.
    """

    def __init__(self, optimizer: BF16Optimizer) -> None:
        self._optimizer, self._recipe = optimizer, optimizer.recipe
        self._header: dict[str, Any] | None = None
        self._states: dict[Tensor, dict[str, Any]] = {}
        self._changes = Changes()
        self._was_seen = True
        self.hooked = False
        self.exact: dict[Tensor, dict[str, Any]] = {}
        self.unchanged = suffix_errors(_UNCHANGED)

    def take(self, _: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Read the states, and return the state dict without them: a hook before torch's method."""
        optimizer, self.hooked = self._optimizer, True
        self._was_seen = getattr(optimizer.state, "seen", True)
        schema.check_state_dict(state_dict)
        self._header = state_dict.get(schema.HEADER)
        schema.check_header(self._header)
        self._recipe = schema.with_saved_seed(optimizer.recipe, self._header)
        self._states.update(_read(optimizer, state_dict, self._changes))
        return {
            **state_dict,
            "state": schema.unowned_states(state_dict),
            "param_groups": _named_groups(optimizer, state_dict),
        }

    def take_placed(self, state_dict: dict[str, Any]) -> None:
        """Take and put what a class has loaded by itself, without calling torch's hooks."""
        read = self.take(None, _as_placed(self._optimizer, state_dict))
        groups = zip(self._optimizer.param_groups, read["param_groups"], strict=True)
        for group, saved in groups:
            group.update({k: each for k, each in saved.items() if k != "params"})
        self.put(None)

    def read_placed(self, groups: list[dict[str, Any]]) -> None:
        """Read the states that are in the optimizer."""
        optimizer = self._optimizer
        for number, (ours, theirs) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            for position, parameter in enumerate(ours["params"]):
                if state := dict.get(optimizer.state, parameter):
                    # Copies: whoever put them there may hold the tensors.
                    state = _copy(state, {}, parameter.ndim)
                    place, options = (number, position), {**ours, **theirs}
                    state = _completed_state(optimizer, place, options, state, self._changes)
                    self._states[parameter] = state

    def put(self, _: Any) -> None:
        """Put the states into the optimizer: a hook after torch's method."""
        # Errors of the user's hooks, which follow, come too late for it.
        self.unchanged.cancel()
        optimizer, states, header = self._optimizer, self._states, self._header or {}
        dict.update(optimizer.state, states)
        self.exact = {parameter: dict(state) for parameter, state in states.items()}
        inherited_masters.keep(optimizer, parameters_of(optimizer))
        set_seen(optimizer.state, self._was_seen)
        optimizer._engine.invalidate()
        optimizer._engine.loaded = {
            p: (shard_of(p).version(), not MASTERS.isdisjoint(state)) for p, state in states.items()
        }
        optimizer._engine.load_norm(header.get("last_norm"), begun=bool(states))
        if header.get(schema.WRITTEN):
            _watch(optimizer, states)
        optimizer.recipe = self._recipe
        tell_of_other_noise(optimizer, header.get("names") or [], states)
        if self._changes.counts:
            _logger.log(
                logging.WARNING if self._changes.lost else logging.INFO,
                "loaded a state dict %s into recipe %r: %s. Keep the file if the rounded numbers "
                "may be needed exactly",
                f"of recipe {label_of(header['recipe'])!r}" if header else "without a recipe",
                self._recipe.label,
                self._changes,
            )


def _put_back(optimizer: BF16Optimizer, exact: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Put back the fp32 states that a class's own ``load_state_dict`` has cast to bf16.

    Some cast states to their parameter's dtype once torch's method has run, as adv_optm's do.
    """
    for parameter, state in exact.items():
        live = dict.get(optimizer.state, parameter, {})
        for key, each in state.items():
            now = live.get(key)
            cast = isinstance(now, Tensor) and now.dtype == parameter.dtype == torch.bfloat16
            if cast and isinstance(each, Tensor) and each.dtype == torch.float32:
                live[key] = each


def _watch(optimizer: BF16Optimizer, states: Mapping[Tensor, dict[str, Any]]) -> None:
    """Look for writes from now on: a program that wrote weights before each step still does."""
    for parameter, state in states.items():
        shard = shard_of(parameter)
        if (watch := DataWatch.of(shard, state)) is not None:
            watch.follow_writes()
            watch.note_step()
            snapshot = optimizer._engine.snapshots[parameter] = Snapshot.of(shard)
            snapshot.masters, snapshot.data = planes_of_master(state), watch


def _as_placed(optimizer: BF16Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict with the states that a class's own ``load_state_dict`` has placed.

    One that runs none of torch's hooks, as bitsandbytes' does, may also have unwrapped what its
    ``state_dict`` wraps, and cast tensors to the parameter's dtype: the saved ones count.
    """
    states = dict(state_dict["state"])
    groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    for group, saved_group in groups:
        for parameter, key in zip(group["params"], saved_group["params"], strict=True):
            saved: dict[str, Any] = states.get(key, {})
            for each in [each for each in saved.values() if isinstance(each, Mapping)]:
                saved = {**each, **saved}
            placed = dict.get(optimizer.state, parameter, {})
            states[key] = {name: saved.get(name, each) for name, each in placed.items()}
    return {**state_dict, "state": states}


def check(optimizer: BF16Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise what :func:`load` would raise, without loading anything."""
    with suffix_errors(_UNCHANGED):
        schema.check_state_dict(state_dict)
        schema.check_header(state_dict.get(schema.HEADER))
        check_groups(optimizer, state_dict)
        for _ in _read(optimizer, state_dict, Changes()):
            pass


def check_groups(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Raise if a state dict has other numbers of groups or parameters than any optimizer."""
    theirs, ours = (
        [len(group["params"]) for group in groups]
        for groups in (state_dict["param_groups"], optimizer.param_groups)
    )
    if theirs != ours:
        raise StateMismatchError(
            f"the state dict has groups of {theirs} parameters and the optimizer of {ours}; it "
            "was saved from another model"
        )


def _named_groups(optimizer: BF16Optimizer, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    """The saved groups, completed with our options, which they may lack."""
    groups = []
    for theirs, ours in zip(state_dict["param_groups"], optimizer.param_groups, strict=False):
        names = _names(theirs, ours)
        rest = {k: v for k, v in theirs.items() if k != "param_names"}
        # Without names, torch keeps those of the live group.
        named = rest if names is None else {**rest, "param_names": names}
        groups.append(_completed(optimizer, named, ours))
    return [*groups, *state_dict["param_groups"][len(groups) :]]


def _names(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str | None] | None:
    """The names of a saved group's parameters; None if the live ones are better.

    What FSDP1 has flattened may have been flattened in another way when it was saved. And where
    parameters are known by name, torch takes a group's options from one that had others of them, in
    another pipeline, say: if names of both are alike, they are given in the same way.
    """
    names, keys = theirs.get("param_names"), theirs["params"]
    if names is None or any_flattened(ours["params"]):
        return None
    if all(isinstance(key, str) for key in keys):
        live = ours.get("param_names")
        if not _bare(names).isdisjoint(_bare(live or keys)):
            return None if live else [*keys]
    return names if len(names) == len(keys) else None


def _bare(names: Iterable[str | None]) -> set[str]:
    return {bare_name(name) for name in names if name is not None}


def _completed(
    optimizer: BF16Optimizer, theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> dict[str, Any]:
    """A saved group with our options, which another library's AdamW does not save."""
    filled = {k: v for k, v in ours.items() if k in _OURS}
    if _DECOUPLED in optimizer.defaults:
        # As torch's classes do.
        filled[_DECOUPLED] = optimizer.decouples
    return {**filled, **theirs}


def _check_completed(optimizer: BF16Optimizer, group: dict[str, Any], number: int) -> None:
    """Refuse a completed group, which may have options of both sides, if no step can take it."""
    with prefix_errors(lambda: "after loading,"):
        optimizer._check_options(group, number)
        resolve_peak_lr(dict(group), number, optimizer.decouples_decay(group))


def _read(
    optimizer: BF16Optimizer, state_dict: dict[str, Any], changes: Changes
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    saved_groups = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != [len(group["params"]) for group in saved_groups]:
        return  # torch refuses this right after
    header: Any = state_dict.get(schema.HEADER)
    schema.check_family(header, optimizer.family, type(optimizer).__name__)
    saved_names = (header or {}).get("names") or []
    names = [[name and bare_name(name) for name in of_group] for of_group in saved_names]
    schema.check_names(names, optimizer._engine.names.known(optimizer.param_groups))
    pairs = zip(optimizer.param_groups, saved_groups, strict=True)
    for number, (group, saved_group) in enumerate(pairs):
        # Any other entry belongs to users, schedulers or foreign classes, and is not required.
        if optimizer.rule_of_group(group) is not STORE:
            own = [name for name in group if name in optimizer.defaults and name not in _OURS]
            schema.check_hyperparameters(saved_group, own, number)
        completed = _completed(optimizer, saved_group, group)
        _check_completed(optimizer, completed, number)
        for position, key in enumerate(saved_group["params"]):
            if state := state_dict["state"].get(key):
                parameter, options = group["params"][position], {**group, **completed}
                if header is None:
                    shard, dtype = shard_of(parameter), parameter.dtype
                    formats = [
                        optimizer.recipe.format_of(role, shard.shape, dtype)
                        for role in (FIRST_MOMENT, SECOND_MOMENT)
                    ]
                    # Nothing is lost where fp32 weights were loaded, from which masters start.
                    (loaded,) = remainders.find_unwritten([shard])
                    exact = loaded is not None and loaded.is_beyond_bf16()
                    lost = Changes() if exact else changes
                    state = without_stale_remainders(state, formats, lost)
                else:
                    # fairseq saves all bf16 tensors as fp32.
                    state = {**state, **restored_remainders(state)}
                if parameter.device.type == "meta":
                    raise StateMismatchError(
                        f"{optimizer.label(number, position)} is on the meta device, where a state "
                        "would be lost. Give the model memory first (model.to_empty(device=...)), "
                        "make the optimizer of its parameters, and load the weights, then the "
                        "state dict"
                    )
                state = _copy(state, dict.get(optimizer.state, parameter, {}), parameter.ndim)
                place = number, position
                yield parameter, _completed_state(optimizer, place, options, state, changes)


def _completed_state(
    optimizer: BF16Optimizer,
    place: tuple[int, int],
    options: dict[str, Any],
    state: dict[str, Any],
    changes: Changes,
) -> dict[str, Any]:
    """A saved state as the optimizer keeps it.

    Args:
        optimizer: the optimizer.
        place: the numbers of the parameter's group, and of the parameter in it.
        options: the options of its group.
        state: from :func:`_copy`; changed.
        changes: counts what has been rounded.
    """
    number, position = place
    parameter = optimizer.param_groups[number]["params"][position]
    used = keys_of(optimizer.rule_of_parameter(options, parameter))
    for name in state.keys() - used:
        if is_stand_in(state[name]):
            del state[name]
        elif isinstance(state[name], Tensor):
            # As torch does; states that the rule uses are moved elsewhere.
            state[name] = state[name].to(parameter.device)
    only_masters = not parameter.requires_grad and state.keys() <= MASTERS
    label = functools.partial(optimizer.label, number, position)
    state = optimizer._complete(state, shard_of(parameter), options, label, changes)
    return planes_of_master(state) if only_masters else state


def _copy(state: Mapping[str, Any], own: Mapping[str, Any], dims: int) -> dict[str, Any]:
    """A saved state as kernels read it, with copies of all tensors but the optimizer's own.

    Tensors that torch.distributed.checkpoint has loaded in place need no copy.
    """
    view = to_view(own)
    copy = dict(state)
    for key, each in state.items():
        if same_memory(each, view.get(key)):
            copy[key] = own[key]
        elif isinstance(each, Tensor):
            copy[key] = each.clone()
    return from_view(copy, dims)
