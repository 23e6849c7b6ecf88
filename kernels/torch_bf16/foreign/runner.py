"""An optimizer's own ``step``, run on fp32 copies of its parameters, gradients and states."""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_bf16.errors import UNTOUCHED, add_note

from .advice import refusal
from .backup import Backup
from .contents import names_any, within
from .list_options import ListOptions
from .meetings import Meetings

if TYPE_CHECKING:
    from .optimizer import ForeignOptimizer

__all__ = ["Runner", "looks_up", "own_attributes"]

# Attributes that this package keeps on a converted optimizer, or that copies replace.
_REPLACED = frozenset(
    {"param_groups", "state", "step", "recipe", "backend", "observers", "roles", "bucket_bytes"}
    | {"_engine"}
)


# Errors that say nothing about the class whose step raises them.
_OF_THE_MACHINE = (MemoryError, OSError, torch.OutOfMemoryError)


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes that the optimizer's own class reads and writes, hooks excepted."""
    return {
        name: each
        for name, each in vars(optimizer).items()
        if name not in _REPLACED and not name.endswith("_hooks")
    }


def _shared_states(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """The entries of ``optimizer.state`` whose keys are not parameters, such as counters."""
    return {key: each for key, each in states.items() if not isinstance(key, Tensor)}


def looks_up(
    attributes: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], ids: Collection[int]
) -> str | None:
    """Say where something is kept by parameters, or their ids, outside ``state``; None if nowhere.

    Each step gets other copies of the parameters, by which it would not be found again.
    """
    places = [(f"in its attribute {name}", each) for name, each in attributes.items()]
    for group in groups:
        options = ((name, each) for name, each in group.items() if name != "params")
        places += [(f"in the option {name} of its groups", each) for name, each in options]
    for place, each in places:
        if names_any(each, ids):
            return (
                f"it looks up parameters, or their id(), {place}, and each step would get other "
                "copies of them; `state` is the place for what belongs to a parameter"
            )
    return None


class _Groups(list[dict[str, Any]]):
    """Parameter groups that note whether one is read by its number."""

    indexed = False

    def __getitem__(self, number: Any) -> Any:
        self.indexed = True
        return super().__getitem__(number)


class Runner:
    """One step of an optimizer's own class, in one call of its ``step`` or in several.

    Each call gets an instance of its own, with the options, attributes and shared states from
    before the step. What it writes in place in the objects there is seen by the next call.

    Args:
        optimizer: the optimizer whose attributes and options count; only :meth:`finish` changes it.
        active: the numbers of the groups that the calls have members of, together.

    Attributes:
        indexes: whether the class reads a group by its number, as this and other steps have shown.
        attributes: attributes that the calls have set.
        shared: the states under keys that are not parameters, as the last call left them.
        draws: whether the calls drew random numbers.
        couples: whether a call that was followed has coupled its members.
    """

    def __init__(self, optimizer: ForeignOptimizer, active: Collection[int]) -> None:
        self._optimizer, self._kind, self._active = optimizer, optimizer.torch_class, active
        self.indexes = optimizer._engine.traits.indexes
        self._before = own_attributes(optimizer)
        self.shared = self._shared_before = _shared_states(optimizer.state)
        self._hooks = [name for name in vars(optimizer) if name.endswith("_hooks")]
        self._options: dict[int, dict[str, Any]] = {}
        self._random: Any = None
        self._backup: Backup | None = None
        self.attributes: dict[str, Any] = {}
        self.draws = self.couples = False

    def run(
        self,
        members: Sequence[tuple[int, nn.Parameter, dict[str, Any]]],
        originals: Sequence[Tensor],
        method: str = "step",
        follow: bool = False,
        undoable: bool = False,
    ) -> list[dict[str, Any]]:
        """Call a method of the class, without hooks and with gradients switched off.

        Args:
            members: for each, the number of its group, the parameter with its gradient, its state.
            originals: the parameters of which these are copies.
            method: ``step``, or a method without arguments.
            follow: whether to find out if the call couples its members.
            undoable: whether :meth:`rewind` undoes what the call writes in place, as an error does.

        Returns:
            The new state of each member.
        """
        instance: Any = object.__new__(self._kind)
        vars(instance).update(self._before, **{name: OrderedDict() for name in self._hooks})
        with_members: dict[int, list[nn.Parameter]] = defaultdict(list)
        for number, parameter, _ in members:
            with_members[number].append(parameter)
        numbers = self._numbers(with_members)
        ids = {id(each) for each in originals}
        lists = {number: self._lists_of(number, ids, with_members) for number in numbers}
        options = {number: self._options_of(number) for number in numbers}
        for number, each in lists.items():
            options[number] |= {name: [*entries] for name, entries in each.cut.items()}
        if undoable:
            self._backup = Backup(self._before, options, [state for _, _, state in members])
        instance.param_groups = groups = _Groups(
            {**options[number], "params": with_members.get(number) or self._stand_ins(number)}
            for number in numbers
        )
        instance.state = defaultdict(dict, {p: state for _, p, state in members if state})
        # Copies, because a call may write to a tensor there, such as a counter.
        instance.state.update(copy.deepcopy(self._shared_before))
        function = _without_hooks(getattr(self._kind, method))
        parameters = [parameter for _, parameter, _ in members]
        before = _random_states(parameters)
        self._random = self._random or before
        meetings = None
        if follow:
            numbered = dict(zip(numbers, groups, strict=True))
            meetings = Meetings(members, lambda: (numbered, own_attributes(instance)))
        try:
            uncompiled = _uncompiled() if follow else nullcontext()
            with torch.no_grad(), uncompiled, meetings or nullcontext():
                function(instance, **self._closure_of(function, parameters))
        except BaseException as error:
            if self._backup is not None:
                self._backup.restore()
            if isinstance(error, Exception) and not isinstance(error, _OF_THE_MACHINE):
                add_note(error, self._explain(error, follow))
            raise
        if meetings is not None:
            meetings.finish(_shared_states(instance.state))
            self.couples |= meetings.couples
        after = _random_states(parameters)
        self.draws |= before[0] != after[0]
        self.draws |= any(not torch.equal(before[1][key], each) for key, each in after[1].items())
        for number, group in zip(numbers, groups, strict=True):
            # What a call for members of the group leaves counts for more than another call's.
            if number in with_members or number not in self._options:
                joined = lists[number].joined(group, self._options.get(number, {}))
                self._options[number] = _news(options[number], group) | joined
        self.indexes |= groups.indexed
        self.attributes |= _news(self._before, own_attributes(instance))
        self.shared = _shared_states(instance.state)
        return [instance.state.get(parameter, {}) for _, parameter, _ in members]

    def _explain(self, error: Exception, follow: bool) -> str:
        """A note for an error of the class's own step: what differs from a step in torch."""
        compiled = ", and its first steps run uncompiled" if follow else ""
        copies = (
            f"torch_bf16 runs the step of {self._kind.__name__} on float32 copies of its "
            f"parameters{compiled}."
        )
        loaded = (
            f" If {error} is an option or a state, a state dict of another class may have been "
            f"loaded: load one of {self._kind.__name__}, or start without it."
        ) * isinstance(error, KeyError)
        return (
            f"{copies}{loaded} A class that needs bfloat16 ones, or reads their bits, cannot be "
            "converted: train in float32, or use another optimizer"
        )

    def _closure_of(self, function: Any, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """A closure for a method that requires one, or that takes one if the user's step did."""
        closure = inspect.signature(function).parameters.get("closure")
        evaluated = self._optimizer._engine.evaluated
        if closure is None or (evaluated is None and closure.default is not closure.empty):
            return {}
        (loss,) = evaluated or (None,)
        return {"closure": _closure_for(self._kind, parameters, loss)}

    def _numbers(self, with_members: Collection[int]) -> list[int]:
        """The groups of a call: those with members, and those that no call has members of.

        The counters of the latter go on, as in any step. If groups are read by number, all.
        """
        every = range(len(self._optimizer.param_groups))
        if self.indexes:
            return [*every]
        return [n for n in every if n in with_members or n not in self._active]

    def _options_of(self, number: int) -> dict[str, Any]:
        group = self._optimizer.param_groups[number]
        return {key: each for key, each in group.items() if key != "params"}

    def _lists_of(
        self, number: int, ids: Collection[int], with_members: Collection[int]
    ) -> ListOptions:
        group = self._optimizer.param_groups[number]
        if number not in with_members:  # its stand-in has the place of the first parameter
            ids = {*map(id, group["params"][:1])}
        return ListOptions(group, self._optimizer.defaults, ids)

    def _stand_ins(self, number: int) -> list[nn.Parameter]:
        """One parameter without a gradient, for a step that reads a device or a shape there."""
        some = self._optimizer.param_groups[number]["params"][:1]
        return [nn.Parameter(torch.zeros((1,) * p.ndim, device=p.device)) for p in some]

    def why_not(self, copies: Sequence[Tensor]) -> str | None:
        """Why the class cannot step on copies, if its last call, with these, has shown that."""
        ids = {id(each) for each in copies}
        groups = range(len(self._optimizer.param_groups))
        options = [{**self._options_of(n), **self._options.get(n, {})} for n in groups]
        if why := looks_up({**self._before, **self.attributes}, options, ids):
            return why
        # Single numbers are counts or verdicts, not what belongs to a parameter.
        for name, each in self.attributes.items():
            if any(isinstance(inner, Tensor) and inner.numel() > 1 for inner in within(each)):
                return f"it keeps tensors in its attribute {name}, outside `state`"
        for key, each in self.shared.items():
            if any(isinstance(x, Tensor) and x.numel() > 1 for x in within({key: each})):
                return f"it keeps tensors under the key {key!r} of its state"
        return None

    def rewind(self) -> None:
        """Reset the random number generators to their states before the first call.

        If that was undoable, what it has written in place is reset, too.
        """
        if self._backup is not None:
            self._backup.restore()
        if self._random is not None:
            random.setstate(self._random[0])
            for device, state in self._random[1].items():
                torch.set_rng_state(state) if device is None else torch.cuda.set_rng_state(
                    state, device
                )

    def finish(self) -> None:
        """Store the options, attributes and shared states of the calls in the optimizer."""
        for number, options in self._options.items():
            self._optimizer.param_groups[number].update(options)
        vars(self._optimizer).update(self.attributes)
        for key in _shared_states(self._optimizer.state):
            del self._optimizer.state[key]
        self._optimizer.state.update(self.shared)


def _news(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are new, or another object than before."""
    return {
        name: each
        for name, each in after.items()
        if name != "params" and (name not in before or before[name] is not each)
    }


def _uncompiled() -> AbstractContextManager[Any]:
    """Run compiled functions uncompiled: operations of compiled code cannot be followed.

    Under a dispatch mode torch.compile gives up, and raises with ``fullgraph=True``.
    """
    # Importing it takes a second, and nothing is compiled without it.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _random_states(parameters: Sequence[Tensor]) -> tuple[Any, dict[Any, Tensor]]:
    devices = {p.device for p in parameters if p.is_cuda}
    states = {device: torch.cuda.get_rng_state(device) for device in devices}
    return random.getstate(), {None: torch.get_rng_state(), **states}


def _closure_for(kind: type, parameters: Sequence[Tensor], loss: Any) -> Callable[[], Any]:
    """A closure for a step whose model was evaluated before: the step may call it once, first."""
    versions = [each._version for each in parameters]

    def closure() -> Any:
        if versions != [each._version for each in parameters]:
            why = "it evaluates the closure with other weights, or several times a step"
            raise NotImplementedError(f"{refusal(kind, why)}. {UNTOUCHED}")
        versions.clear()
        return loss

    return closure


def _without_hooks(step: Any) -> Any:
    """The class's own ``step`` without torch's wrapper for hooks, which run around our step."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step
