"""An optimizer's own ``step``, run on fp32 copies of its parameters, gradients and states."""

from __future__ import annotations

import copy
import inspect
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Runner", "own_attributes", "shared_states"]

# What we keep on a converted optimizer, and what copies replace.
_REPLACED = frozenset(
    {"param_groups", "state", "step", "recipe", "backend", "observers", "roles", "bucket_bytes"}
    | {"_engine"}
)


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes that the optimizer's own class reads and writes, hooks excepted."""
    return {
        name: each
        for name, each in vars(optimizer).items()
        if name not in _REPLACED and not name.endswith("_hooks")
    }


def shared_states(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """What ``optimizer.state`` holds under keys that are no parameters, such as counters."""
    return {key: each for key, each in states.items() if not isinstance(key, Tensor)}


class Runner:
    """One step of an optimizer's own class, in one call of its ``step`` or in several.

    Each call gets an instance of its own, with the options, attributes and shared states of before
    the step.

    Args:
        optimizer: whose attributes and options count; changed by :meth:`finish` only.
        kind: its own class.

    Attributes:
        attributes: what the calls set.
        shared: the states under keys that are no parameters, as the last call left them.
        draws: whether they drew random numbers.
    """

    def __init__(self, optimizer: Any, kind: type[torch.optim.Optimizer]) -> None:
        self._optimizer, self._kind = optimizer, kind
        self._before = own_attributes(optimizer)
        self.shared = self._shared_before = shared_states(optimizer.state)
        self._hooks = [name for name in vars(optimizer) if name.endswith("_hooks")]
        self._options: dict[int, dict[str, Any]] = {}
        self.attributes: dict[str, Any] = {}
        self.draws = False

    def run(
        self, members: Sequence[tuple[int, nn.Parameter, dict[str, Any]]], method: str = "step"
    ) -> list[dict[str, Any]]:
        """Call a method of the class, without hooks and with gradients switched off.

        Args:
            members: of each the number of its group, the parameter with its gradient, its state.
            method: ``step``; or one that has no arguments, for which groups without members count.

        Returns:
            The new state of each.
        """
        own: Any = object.__new__(self._kind)
        vars(own).update(self._before, **{name: OrderedDict() for name in self._hooks})
        numbers = sorted({number for number, _, _ in members})
        if method != "step":
            numbers = range(len(self._optimizer.param_groups))
        own.param_groups = [
            {k: v for k, v in self._optimizer.param_groups[number].items() if k != "param_names"}
            | {"params": [parameter for its, parameter, _ in members if its == number]}
            for number in numbers
        ]
        own.state = defaultdict(dict, {p: state for _, p, state in members if state})
        # Copies, because a call may count in the tensor that it finds there.
        own.state.update(copy.deepcopy(self._shared_before))
        before = _random_states(members)
        with torch.no_grad():
            function = unhooked(getattr(self._kind, method))
            given = [parameter for _, parameter, _ in members]
            function(own, *([evaluated(given)] if needs_closure(function) else []))
        self.draws |= before != _random_states(members)
        for number, group in zip(numbers, own.param_groups, strict=True):
            self._options[number] = {k: v for k, v in group.items() if k != "params"}
        for name, each in own_attributes(own).items():
            if name not in self._before or self._before[name] is not each:
                self.attributes[name] = each
        self.shared = shared_states(own.state)
        return [own.state.get(parameter, {}) for _, parameter, _ in members]

    def finish(self) -> None:
        """Put the options, attributes and shared states that the calls left into the optimizer."""
        for number, options in self._options.items():
            self._optimizer.param_groups[number].update(options)
        vars(self._optimizer).update(self.attributes)
        for key in shared_states(self._optimizer.state):
            del self._optimizer.state[key]
        self._optimizer.state.update(self.shared)


def _random_states(members: Sequence[tuple[int, nn.Parameter, Any]]) -> tuple[Any, ...]:
    devices = {str(p.device): p.device for _, p, _ in members if p.is_cuda}.values()
    states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
    return random.getstate(), *(each.numpy().tobytes() for each in states)


def needs_closure(step: Any) -> bool:
    """Whether a step has a closure without a default."""
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def evaluated(parameters: Sequence[Tensor]) -> Callable[[], None]:
    """A closure for a step whose model was evaluated before it: it may be called once, at first."""
    versions = [each._version for each in parameters]

    def closure() -> None:
        if versions != [each._version for each in parameters]:
            raise ValueError("it evaluates the closure with other weights, or several times a step")
        versions.clear()

    return closure


def unhooked(step: Any) -> Any:
    """The class's own ``step``: torch wraps it so that hooks run, and these run around ours."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step
