"""An optimizer's own ``step``, run on fp32 stand-ins for its parameters, gradients and states."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["OURS", "Runner", "unhooked"]

# Attributes that are not the wrapped class's own, or that stand-ins replace.
OURS = frozenset({"param_groups", "state", "step", "recipe", "backend", "observers"}) | {
    *(
        "roles",
        "bucket_bytes",
        "_names",
        "_whole",
        "_plan",
        "_pieces",
        "_seen",
        "_next",
        "_accumulation",
        "_couples",
        "_halves",
    )
}


class Runner:
    """An instance of the optimizer's own class over stand-ins, for one call of its ``step``.

    Args:
        optimizer: whose class, attributes and options count; not changed.
        kind: its own class.
        members: ``(group number, stand-in with its gradient, its state)``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: type[torch.optim.Optimizer],
        members: Sequence[tuple[int, nn.Parameter, dict[str, Any]]],
    ) -> None:
        own: Any = object.__new__(kind)
        hooks = {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}
        self._attributes = {
            name: each for name, each in vars(optimizer).items() if name not in OURS | hooks.keys()
        }
        own.__dict__.update(copy.copy(self._attributes) | hooks)
        self.numbers = sorted({number for number, _, _ in members})
        own.param_groups = [
            {
                **{k: v for k, v in optimizer.param_groups[number].items() if k != "param_names"},
                "params": [parameter for its, parameter, _ in members if its == number],
            }
            for number in self.numbers
        ]
        own.state = defaultdict(dict, {p: state for _, p, state in members if state})
        self._own, self._step = own, unhooked(kind.step)

    def step(self) -> None:
        """Run it, with gradients switched off as an optimizer's step expects."""
        with torch.no_grad():
            self._step(self._own)

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """What it keeps for a stand-in now."""
        return self._own.state.get(parameter, {})

    def options(self) -> dict[int, dict[str, Any]]:
        """The options of each parameter group now, by the group's number."""
        return {
            number: {k: v for k, v in group.items() if k != "params"}
            for number, group in zip(self.numbers, self._own.param_groups, strict=True)
        }

    def changed_attributes(self) -> dict[str, Any]:
        """Attributes that are other objects than before the step."""
        missing = object()
        return {
            name: each
            for name, each in vars(self._own).items()
            if name not in OURS
            and not name.endswith("_hooks")
            and self._attributes.get(name, missing) is not each
        }


def unhooked(step: Any) -> Any:
    """The class's own ``step``: torch wraps it so that hooks run, and these run around ours."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step
