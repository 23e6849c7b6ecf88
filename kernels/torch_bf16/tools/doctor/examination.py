"""Examine one checkpoint or two, weight by weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_bf16.checkpoints.reader import Saved, SavedTensor
from torch_bf16.errors import CheckpointError
from torch_bf16.sharding import bare_name

from .assignment import State, assign_states
from .exact import Read, has_master, hides_bits, weight
from .known_updates import steps_taken
from .movement import Movement, movement
from .next_update import NextUpdate, Rounding, next_update, rounding

__all__ = ["Examination", "Examined", "examine", "lacks_bits"]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_COUNTS = (torch.int64, torch.bool)  # of buffers, never of weights


@dataclass(frozen=True)
class Examined:
    """What was measured of one weight.

    Attributes:
        name: its name in the later checkpoint.
        shape: its shape.
        dtype: its dtype in the later checkpoint.
        movement: how far its elements moved.
        next_update: the update that the optimizer's state makes; None if that cannot be known.
        rounding: what happens to small updates, as far as the later checkpoint tells.
        master: whether either checkpoint has an exact master of it.
        lacks: which checkpoint, ``"earlier"`` or ``"later"``, has no master although the other one
            does, or is in fp32, so that the bf16 numbers of both were compared; else None.
        hidden: whether an optimizer keeps bits of it that cannot be read here.
        frozen: whether the later checkpoint shows that no optimizer updates it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    movement: Movement
    next_update: NextUpdate | None
    rounding: Rounding
    master: bool
    lacks: str | None
    hidden: bool
    frozen: bool


@dataclass(frozen=True)
class Examination:
    """What was measured of all weights of a run.

    Attributes:
        weights: the weights that both checkpoints have.
        compared: whether there are two checkpoints.
        steps: from the earlier checkpoint to the later, or up to the only one; None if unknown.
        notes: what was left out, and why.
    """

    weights: list[Examined]
    compared: bool
    steps: int | None
    notes: list[str]


def examine(
    before: Saved | None, after: Saved, lr: float | None, progress: Callable[[str], None]
) -> Examination:
    """Go through a run's checkpoints, one piece of one weight in memory at a time.

    Args:
        before: the earlier checkpoint; None to examine only the later one's optimizer.
        after: the later checkpoint.
        lr: a learning rate in place of the one in ``after``.
        progress: called with a line of text for each weight.

    Raises:
        CheckpointError: the checkpoints have no weight in common, the earlier one has the higher
            step, or there is only one and its optimizer's state cannot be used.
    """
    _refuse_swapped(before, after)
    notes = [*(before.notes if before else []), *after.notes]
    pairs = _pairs(before, after, notes)
    assigned = assign_states(after)
    states = assigned.states
    notes += [assigned.note] if assigned.note else []
    earlier = assign_states(before).states if before is not None else {}
    if before is None and not states:
        raise CheckpointError(
            f"{after.path} has no state of an optimizer that could be assigned to its weights, and "
            "one checkpoint without it cannot show what moved. Give an earlier one, too: "
            f"python -m torch_bf16 doctor EARLIER LATER{_told(notes)}"
        )
    found = []
    headers = [each.header for each in after.optimizers]
    alike = headers and all(each.get("recipe") == headers[0].get("recipe") for each in headers)
    nothing: State = ({}, {}, headers[0] if alike else {})
    for number, (name, old_name, new) in enumerate(pairs):
        progress(f"{number + 1} of {len(pairs)}: {name}")
        state, group, header = states.get(name, nothing)
        old = None if before is None or old_name is None else before.tensors[old_name]
        old_state = nothing[0] if old_name is None else earlier.get(old_name, nothing)[0]
        first, last, lacks = _readers(old, old_state, new, state)
        moved = movement(first, last, new.numel, lacks is not None and _is_wide(new))
        found.append(
            Examined(
                name,
                new.shape,
                new.dtype,
                moved,
                next_update(weight(new, state), state, group, new.shape, lr),
                rounding(new, state, header),
                has_master(new, state) or (old is not None and has_master(old, old_state)),
                lacks,
                _hides(after, new, state)
                or (before is not None and old is not None and _hides(before, old, old_state)),
                assigned.complete and name not in states,
            )
        )
    for which, path in (("earlier", before and before.path), ("later", after.path)):
        for master in (True, False):
            lack = [each for each in found if each.lacks == which and lacks_bits(each)]
            lacking = sum(each.master == master for each in lack)
            if lacking:
                what = "the exact masters" if master else "all but the bf16 numbers"
                where = "has in its optimizer's state" if master else "has in fp32"
                notes.append(
                    f"{path} lacks {what} of {lacking} weights, which the other checkpoint "
                    f"{where}: their bf16 numbers were compared, so that only moves of at least a "
                    "bf16 spacing show"
                )
    return Examination(found, before is not None, _steps(before, after, states), notes)


def _hides(saved: Saved, tensor: SavedTensor, state: Mapping[str, Any]) -> bool:
    return hides_bits(tensor, state) or (saved.hidden and not _is_wide(tensor))


def lacks_bits(weight: Examined) -> bool:
    """Whether one checkpoint has more of a weight than bf16 numbers, and the other has not."""
    return weight.lacks is not None and (weight.master or not weight.movement.rounded)


def _refuse_swapped(before: Saved | None, after: Saved) -> None:
    if before is None or before.step is None or after.step is None or before.step <= after.step:
        return
    raise CheckpointError(
        f"{before.path} is of step {before.step:,} and {after.path} of step {after.step:,}: give "
        "the earlier one first"
    )


def _readers(
    old: SavedTensor | None,
    old_state: Mapping[str, Any],
    new: SavedTensor,
    state: Mapping[str, Any],
) -> tuple[Read | None, Read, str | None]:
    """Readers of a weight in both checkpoints, as precise as both allow, and which lacks a master.

    Args:
        old: the weight in the earlier checkpoint; None if there is no earlier one.
        old_state: what the optimizer in the earlier checkpoint keeps for it.
        new: the weight in the later checkpoint.
        state: what the optimizer in the later checkpoint keeps for it.
    """
    if old is None:
        return None, weight(new, state), None
    pair = ((old, old_state), (new, state))
    had, has = (has_master(*each) or _is_wide(each[0]) for each in pair)
    if had and has:
        return weight(old, old_state), weight(new, state), None
    first, last = weight(old, {}), weight(new, {})
    if _is_wide(old):
        # Training in fewer bits began with this cast.
        return (lambda a, b: first(a, b).to(new.dtype).float()), last, None
    rounded = has_master(new, state) or (_is_wide(new) and old.dtype == torch.bfloat16)
    return first, last, "earlier" if rounded else "later" if has_master(old, old_state) else None


def _is_wide(tensor: SavedTensor) -> bool:
    return tensor.dtype.itemsize >= torch.float32.itemsize


def _pairs(
    before: Saved | None, after: Saved, notes: list[str]
) -> list[tuple[str, str | None, SavedTensor]]:
    """Each weight's names in the later and the earlier checkpoint, and the later tensor.

    Tied weights are listed once.
    """
    tensors = {
        name: each
        for name, each in after.untied().items()
        if each.numel and not name.endswith(("running_mean", "running_var"))
    }
    weights = {name: each for name, each in tensors.items() if each.dtype in _FLOATS}
    notes += _unexamined(each for each in tensors.values() if each.dtype not in _FLOATS)
    if not weights:
        raise CheckpointError(f"{after.path} holds no floating-point weights{_told(notes)}")
    if before is None:
        return [(name, None, each) for name, each in weights.items()]
    old_names = _match_names(before, weights)
    pairs, shapes, others = [], [], []
    for name, each in weights.items():
        old = old_names.get(name)
        if old is None:
            continue
        if before.tensors[old].shape != each.shape:
            shapes.append(f"{name} {before.tensors[old].shape} and {each.shape}")
        elif before.tensors[old].dtype in _FLOATS:
            pairs.append((name, old, each))
        else:
            others.append(before.tensors[old])
    notes += [f"of {before.path}, {each}" for each in _unexamined(others)]
    if shapes:
        notes.append(f"{len(shapes)} weights have other shapes, such as {shapes[0]}")
    if missing := len(weights) - len(pairs) - len(shapes) - len(others):
        notes.append(f"{missing} weights of {after.path} are not in {before.path}")
    if not pairs:
        first, second = (", ".join(list(names)[:3]) for names in (before.tensors, weights))
        raise CheckpointError(
            f"{before.path} and {after.path} have no weight of the same name and shape: {first}, "
            f"... in the first, {second}, ... in the second. They are not of one run{_told(notes)}"
        )
    return pairs


def _unexamined(tensors: Iterable[SavedTensor]) -> list[str]:
    """A note for each dtype whose numbers are not read here, as of quantized weights."""
    counts: dict[torch.dtype, list[int]] = {}
    for each in tensors:
        if each.dtype not in _COUNTS:
            count = counts.setdefault(each.dtype, [0, 0])
            count[0] += 1
            count[1] += each.numel
    return [
        f"{number} tensors of {str(dtype).removeprefix('torch.')} ({numel:,} elements) were not "
        "examined"
        for dtype, (number, numel) in counts.items()
    ]


def _told(notes: list[str]) -> str:
    """Notes at the end of an error, which no report will tell."""
    return f" ({'; '.join(notes)})" if notes else ""


def _match_names(before: Saved, weights: dict[str, SavedTensor]) -> dict[str, str]:
    """Match names as they are, the rest without wrappers' parts; else without one's first part.

    Names that are alike then, such as those of a generator and a discriminator, match nothing.
    """
    found: dict[str, str] = {}
    # Only a part of a model may be wrapped, as by torch.compile.
    for later, earlier in ((str, str), (bare_name, bare_name)):
        found |= _matching(before.tensors.keys() - found.values(), earlier, weights, later, found)
    for later, earlier in ((_inner, bare_name), (bare_name, _inner)):
        found = found or _matching(before.tensors, earlier, weights, later, found)
    return found


def _matching(
    before: Iterable[str],
    earlier: Callable[[str], str],
    after: Iterable[str],
    later: Callable[[str], str],
    found: Mapping[str, str],
) -> dict[str, str]:
    """What is not found yet and has, shortened, the name of one earlier weight alone."""
    names = [*before]
    counts = Counter(map(earlier, names))
    short = {earlier(name): name for name in names if counts[earlier(name)] == 1}
    rest = [name for name in after if name not in found]
    return {name: short[later(name)] for name in rest if later(name) in short}


def _inner(name: str) -> str:
    return bare_name(name).partition(".")[2]


def _steps(before: Saved | None, after: Saved, states: dict[str, State]) -> int | None:
    last = after.step
    if last is None:
        counted = [steps_taken(state, group) for state, group, _ in states.values()]
        last = max(counted, default=0) or None
    if last is None or before is None:
        return last
    return None if before.step is None or last <= before.step else last - before.step
