"""Optimizers of other libraries that share the states of the one that they wrap, as some SAMs do.

``self.state = self.base_optimizer.state`` makes torch's own methods save and load the states of the
wrapped optimizer. If that is ours, they would save bits as numbers, and round fp32 moments to the
dtype of bf16 weights as they load them. So these methods of a wrapper use those of what it wraps.
"""

from __future__ import annotations

import sys
from operator import is_
from typing import Any

import torch

from torch_bf16.engine.states import States
from torch_bf16.engine.wrappers import held_optimizers
from torch_bf16.living import instances_of
from torch_bf16.states.schema import HEADER
from torch_bf16.torch_patches import Replacement

__all__ = ["follow_sharers", "pass_on"]

_Optimizer: Any = torch.optim.Optimizer


def follow_sharers() -> None:
    """Let optimizers that share our states save and load them as we do."""
    _STATE_DICT.apply()
    _LOAD_STATE_DICT.apply()


def pass_on(attributes: dict[str, Any], states: States) -> None:
    """Give the states of a converted optimizer to others that have shared those that it had.

    Args:
        attributes: what the optimizer had before; loses its entry ``"state"``.
        states: those that it has now.
    """
    before, unshared = attributes.pop("state", None), {}
    # A search among all objects takes a while, so only if something else holds them.
    if before is None or sys.getrefcount(before) <= sys.getrefcount(unshared):
        return
    for each in instances_of(_Optimizer):
        for name in [name for name, value in vars(each).items() if value is before]:
            setattr(each, name, states)


def _owner(sharer: Any) -> Any | None:
    """Our optimizer whose states, of the same parameters, another optimizer shares."""
    states = getattr(sharer, "state", None)
    # The wrappers of Lightning and Fabric are subclasses of what they wrap.
    if not isinstance(states, States) or hasattr(sharer, "_engine"):
        return None
    same = [each for each in held_optimizers(sharer) if each.state is states]
    return same[0] if same and _parameters(same[0]) == _parameters(sharer) else None


def _parameters(optimizer: Any) -> list[list[int]]:
    return [[*map(id, group["params"])] for group in optimizer.param_groups]


def _saving(original: Any) -> Any:
    def state_dict(self: Any) -> dict[str, Any]:
        saved, owner = original(self), _owner(self)
        if owner is None:
            return saved
        theirs = owner.state_dict()
        return {**saved, "state": theirs["state"], HEADER: theirs[HEADER]}

    return state_dict


def _loading(original: Any) -> Any:
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        if (owner := _owner(self)) is None:
            original(self, state_dict)
            return
        shares_groups = all(map(is_, self.param_groups, owner.param_groups))
        owner.load_state_dict(state_dict)
        original(self, {**state_dict, "state": {}})
        self.state = owner.state
        if shares_groups:
            self.param_groups = owner.param_groups

    return load_state_dict


_STATE_DICT = Replacement("optimizer_state_dict", _Optimizer, "state_dict", _saving)
_LOAD_STATE_DICT = Replacement("optimizer_state_dict", _Optimizer, "load_state_dict", _loading)
