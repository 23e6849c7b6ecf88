"""Which of an optimizer's states belongs to which weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_bf16.checkpoints.reader import OptimizerStates, Saved, SavedTensor
from torch_bf16.sharding import saved_names

__all__ = ["State", "assign_states"]

State = tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]
"""What an optimizer keeps for a parameter, the hyperparameters of its group, and its header."""


def assign_states(saved: Saved) -> tuple[dict[str, State], str | None]:
    """Assign an optimizer's states to weights, by name; returns a note, too, if some are left over.

    States that the state dict names are assigned by name. Numbered states are assigned by shape and
    by the order of the model, and only if that leaves no choice: a mistake would mix up weights.
    """
    named: dict[str, State] = {}
    for each in saved.optimizers:
        named |= _states_by_name(each)
    numbered = _states_by_number(saved.optimizers)
    keys = saved_names(named, saved.tensors)
    found = {keys[name]: state for name, state in named.items() if name in keys}
    unassigned = len(named) - len(found)
    if numbered and not named:
        order = _order(saved)
        names_by_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)
        untied = saved.untied()
        for name in order or untied:
            each = untied.get(name)
            if each is not None and each.dtype.is_floating_point:
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
        return found, None
    why = "numbered, and safetensors keeps no order" if not saved.ordered else "numbered"
    return found, (
        f"{unassigned} of {unassigned + len(found)} states of the optimizer could not be told "
        f"apart: they are {why}. Next time, construct the optimizer with model.named_parameters()"
    )


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
        for number, group in enumerate(optimizer.groups):
            for key in group.get("params", ()):
                state = optimizer.state.get(key)
                shape = None if state is None else _shape(state)
                if state is not None and shape is not None and not isinstance(key, str):
                    found.append(((which, number), shape, (state, group, optimizer.header)))
    return found


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    for name, each in state.items():
        if isinstance(each, SavedTensor) and not name.endswith("_scale"):
            codes = each.dtype in (torch.int8, torch.uint8) and f"{name}_scale" in state
            return each.shape[:-1] if codes and each.shape[-1:] == (1,) else each.shape
    return None


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
