"""Which of an optimizer's states belongs to which weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_bf16.checkpoints.reader import OptimizerStates, Saved, SavedTensor
from torch_bf16.sharding import saved_names

__all__ = ["Assigned", "State", "assign_states"]

State = tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]
"""What an optimizer keeps for a parameter, the hyperparameters of its group, and its header."""


@dataclass(frozen=True)
class Assigned:
    """The states of a checkpoint's optimizers, by weight.

    Attributes:
        states: what is kept for each weight, by the weight's name.
        complete: whether these are all weights that the optimizers update.
        note: which states are left over, and why; None if none are.
    """

    states: dict[str, State]
    complete: bool
    note: str | None


def assign_states(saved: Saved) -> Assigned:
    """Assign the states of optimizers to weights.

    States that the state dict names are assigned by name. Numbered states are assigned to the
    others by shape and by the order of the model, and only if that leaves no choice: a mistake
    would mix up weights.
    """
    named: dict[str, State] = {}
    for each in saved.optimizers:
        named |= _states_by_name(each)
    numbered = _states_by_number(saved.optimizers)
    keys = saved_names(named, saved.tensors)
    found = {keys[name]: state for name, state in named.items() if name in keys}
    unassigned = len(named) - len(found)
    if numbered:
        order = _order(saved)
        taken = {saved.tensors[name].tied or name for name in found}
        names_by_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)
        untied = saved.untied()
        for name in order or untied:
            each = untied.get(name)
            if each is None or (each.tied or name) in taken:
                continue
            if each.dtype.is_floating_point:
                names_by_shape[each.shape].append(name)
        states_by_shape: dict[tuple[int, ...], list[tuple[Any, State]]] = defaultdict(list)
        for group, shape, state in numbered:
            states_by_shape[shape].append((group, state))
        for shape, states in states_by_shape.items():
            names = names_by_shape.get(shape, [])
            no_choice = len(names) == 1 or (
                order is not None and len({group for group, _ in states}) == 1
            )
            if len(names) == len(states) and no_choice:
                found |= dict(zip(names, (state for _, state in states), strict=True))
            else:
                unassigned += len(states)
    if not unassigned:
        return Assigned(found, bool(found) and _is_complete(saved, len(found)), None)
    why = "numbered, and safetensors keeps no order" if not saved.ordered else "numbered"
    note = (
        f"{unassigned} of {unassigned + len(found)} states of the optimizer could not be told "
        f"apart: they are {why}. Next time, construct the optimizer with model.named_parameters()"
    )
    return Assigned(found, False, note)


def _is_complete(saved: Saved, assigned: int) -> bool:
    """Whether no weight is updated but those that have the ``assigned`` states.

    An optimizer that keeps states keeps one for each weight that has had a gradient; of a group
    that has none, nothing is known.
    """
    groups = ((each.state, group) for each in saved.optimizers for group in each.groups)
    known = all(
        not (keys := group.get("params")) or any(key in state for key in keys)
        for state, group in groups
    )
    kept = sum(len(each.state) for each in saved.optimizers)
    return known and assigned == kept and not saved.further


def _states_by_name(optimizer: OptimizerStates) -> dict[str, State]:
    groups = optimizer.groups
    group_of = {key: group for group in groups for key in group.get("params", ())}
    only = groups[0] if len(groups) == 1 else {}
    return {
        name: (optimizer.state[key], group_of.get(key, only), optimizer.header)
        for key, name in optimizer.names().items()
    }


def _states_by_number(
    optimizers: Sequence[OptimizerStates],
) -> list[tuple[tuple[int, int], tuple[int, ...], State]]:
    found = []
    for which, optimizer in enumerate(optimizers):
        names = optimizer.names()
        for number, group in enumerate(optimizer.groups):
            for key in group.get("params", ()):
                state = optimizer.state.get(key)
                shape = None if state is None else _shape(state)
                if state is not None and shape is not None and key not in names:
                    found.append(((which, number), shape, (state, group, optimizer.header)))
    return found


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of the weight that a state is of; None if it has no tensors.

    Some optimizers keep flattened tensors, means of rows or scalars, too.
    """
    shapes = []
    for name, each in state.items():
        if isinstance(each, SavedTensor) and not name.endswith("_scale"):
            codes = each.dtype in (torch.int8, torch.uint8) and f"{name}_scale" in state
            shapes.append(each.shape[:-1] if codes and each.shape[-1:] == (1,) else each.shape)
    return max(shapes, key=len, default=None)


def _order(saved: Saved) -> Sequence[str] | None:
    """Names in the order of the module's parameters; None if that order is unknown."""
    if saved.ordered:
        return list(saved.tensors)
    config = Path(saved.path) / "config.json"
    if not config.is_file():
        return None
    from torch_bf16.tools.estimate.sources import model_shapes

    try:
        shapes = model_shapes(str(config))
    except (ValueError, ImportError, OSError):
        return None
    names = [each.name for each in shapes.weights if shapes.model is not None]
    return names if names and set(names) <= saved.tensors.keys() else None
