"""Two checkpoints, or one, gone through weight by weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_bf16.errors import CheckpointError
from torch_bf16.sharding import bare_name
from torch_bf16.tools.weights import Saved, SavedTensor

from .assignment import State, assign_states
from .exact import Read, has_master, weight
from .movement import Movement, movement
from .next_update import NextUpdate, Rounding, next_update, rounding

__all__ = ["Examination", "Examined", "examine"]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Examined:
    """One weight.

    Attributes:
        name: in the later checkpoint.
        shape: of it.
        dtype: as it was saved last.
        movement: what became of it.
        next_update: what the optimizer's state says of a step, where there is one.
        rounding: what happens to small updates, as far as the later checkpoint tells.
        master: whether a checkpoint has an exact master of it.
        lacks: which checkpoint, ``"earlier"`` or ``"later"``, has no master where the other one
            does, so that the bf16 numbers of both were compared; else None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    movement: Movement
    next_update: NextUpdate | None
    rounding: Rounding
    master: bool
    lacks: str | None


@dataclass(frozen=True)
class Examination:
    """All weights of a run.

    Attributes:
        weights: that both checkpoints have.
        compared: whether there are two checkpoints.
        steps: from the first to the second, or of the only one; None where that is not told.
        notes: what was left out, and why.
    """

    weights: list[Examined]
    compared: bool
    steps: int | None
    notes: list[str]


def examine(
    before: Saved | None,
    after: Saved,
    lr: float | None,
    progress: Callable[[str], None],
) -> Examination:
    """Go through a run's checkpoints, one piece of one weight in memory at a time.

    Args:
        before: the earlier one; None to look at the later one's optimizer alone.
        after: the later one.
        lr: a learning rate in place of the one in ``after``.
        progress: is told how it goes.

    Raises:
        CheckpointError: they have no weight in common, the earlier one is the later one by its
            step, or there is one and nothing to say of it.
    """
    _refuse_swapped(before, after)
    notes = [*(before.notes if before else []), *after.notes]
    pairs = _pairs(before, after, notes)
    states, note = assign_states(after)
    notes += [note] if note else []
    earlier, _ = assign_states(before) if before is not None else ({}, None)
    header = after.optimizer.header if after.optimizer else {}
    if before is None and not states:
        raise CheckpointError(
            f"{after.path} has no state of an optimizer that could be assigned to its weights, and "
            "one checkpoint without it cannot show what moved. Give an earlier one, too: "
            "python -m torch_bf16 doctor EARLIER LATER"
        )
    found = []
    nothing: State = ({}, {})
    for number, (name, old, new) in enumerate(pairs):
        progress(f"{number + 1} of {len(pairs)}: {name}")
        state, group = states.get(name, nothing)
        then = None if before is None or old is None else before.tensors[old]
        known = nothing[0] if old is None else earlier.get(old, nothing)[0]
        first, last, lacks = _readers(then, known, new, state)
        moved = movement(first, last, new.numel)
        found.append(
            Examined(
                name,
                new.shape,
                new.dtype,
                moved,
                next_update(weight(new, state), state, group, new.numel, lr),
                rounding(new, state, header),
                has_master(new, state) or (then is not None and has_master(then, known)),
                lacks,
            )
        )
    for which, path in (("earlier", before and before.path), ("later", after.path)):
        if lacking := sum(each.lacks == which for each in found):
            notes.append(
                f"{path} lacks the exact masters of {lacking} weights, which the other checkpoint "
                "has with its optimizer's state: their bf16 numbers were compared, so that only "
                "moves of a bf16 spacing show"
            )
    return Examination(found, before is not None, _steps(before, after, states), notes)


def _refuse_swapped(before: Saved | None, after: Saved) -> None:
    if before is None or before.step is None or after.step is None or before.step <= after.step:
        return
    raise CheckpointError(
        f"{before.path} is of step {before.step:,} and {after.path} of step {after.step:,}: give "
        "the earlier one first"
    )


def _readers(
    then: SavedTensor | None, known: Mapping[str, Any], new: SavedTensor, state: Mapping[str, Any]
) -> tuple[Read | None, Read, str | None]:
    """What is compared of a weight, which is what both checkpoints have, and which lacks a master.

    Args:
        then: the weight in the earlier checkpoint, None without one.
        known: what the optimizer kept for it there.
        new: the weight in the later one.
        state: what the optimizer keeps for it there.
    """
    if then is None:
        return None, weight(new, state), None
    had, has = (has_master(*each) or _is_wide(each[0]) for each in ((then, known), (new, state)))
    if had and has:
        return weight(then, known), weight(new, state), None
    first, last = weight(then, {}), weight(new, {})
    if _is_wide(then):
        # Training in fewer bits began with a cast.
        return (lambda a, b: first(a, b).to(new.dtype).float()), last, None
    lacks = "earlier" if has_master(new, state) else "later" if has_master(then, known) else None
    return first, last, lacks


def _is_wide(tensor: SavedTensor) -> bool:
    return tensor.dtype.itemsize >= torch.float32.itemsize


def _pairs(
    before: Saved | None, after: Saved, notes: list[str]
) -> list[tuple[str, str | None, SavedTensor]]:
    """Names in the later and in the earlier checkpoint, and the later tensor; tied ones once."""
    mine = {
        name: each
        for name, each in after.tensors.items()
        if each.dtype in _FLOATS
        and each.numel
        and not name.endswith(("running_mean", "running_var"))
    }
    seen: set[Any] = set()
    for name, each in list(mine.items()):
        if each.tied is not None and each.tied in seen:
            del mine[name]
        seen.add(each.tied)
    if not mine:
        raise CheckpointError(f"{after.path} holds no floating-point weights")
    if before is None:
        return [(name, None, each) for name, each in mine.items()]
    theirs = _match_names(before, mine)
    pairs, shapes = [], []
    for name, each in mine.items():
        old = theirs.get(name)
        if old is None:
            continue
        if before.tensors[old].shape != each.shape:
            shapes.append(f"{name} {before.tensors[old].shape} and {each.shape}")
        elif before.tensors[old].dtype in _FLOATS:
            pairs.append((name, old, each))
    if shapes:
        notes.append(f"{len(shapes)} weights have other shapes, such as {shapes[0]}")
    if missing := len(mine) - len(pairs) - len(shapes):
        notes.append(f"{missing} weights of {after.path} are not in {before.path}")
    if not pairs:
        mine_first, theirs = ", ".join(list(mine)[:3]), ", ".join(list(before.tensors)[:3])
        raise CheckpointError(
            f"{before.path} and {after.path} have no weight of one name and shape: {theirs} and so "
            f"on there, {mine_first} and so on here. They are not of one run"
        )
    return pairs


def _match_names(before: Saved, mine: dict[str, SavedTensor]) -> dict[str, str]:
    """By names as they are, else without what wrappers add, else without one side's first part."""
    for ours, others in (
        (str, str),
        (bare_name, bare_name),
        (_inner, bare_name),
        (bare_name, _inner),
    ):
        short = {others(name): name for name in before.tensors}
        if found := {name: short[ours(name)] for name in mine if ours(name) in short}:
            return found
    return {}


def _inner(name: str) -> str:
    return bare_name(name).partition(".")[2]


def _steps(before: Saved | None, after: Saved, states: dict[str, State]) -> int | None:
    last = after.step
    if last is None:
        counted = (state.get("step") for state, _ in states.values())
        last = max((int(float(step)) for step in counted if step is not None), default=None)
    if last is None or before is None:
        return last
    return None if before.step is None or last <= before.step else last - before.step
