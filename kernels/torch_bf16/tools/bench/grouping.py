"""Which entries are in memory together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_bf16.tools.output import number

from .entries import Entry
from .models import Shapes

__all__ = ["group_entries", "groups_that_fit", "needed_bytes"]


def groups_that_fit(
    entries: Sequence[Entry],
    shapes: Shapes,
    device: torch.device,
    available: int | None,
    most: int | None,
    failures: dict[str, str],
) -> list[list[Entry]]:
    """Group entries as :func:`group_entries` does, without those that do not fit at all.

    Args:
        entries: the baseline first.
        shapes: the shapes of the parameters.
        device: the device that they are on, for the messages.
        available: bytes of memory; None for no bound.
        most: entries in a group; None for no bound.
        failures: receives why an entry was left out, by its name.

    Raises:
        MemoryError: the baseline does not fit.
    """

    def need(entry: Entry) -> int:
        return needed_bytes(entry, shapes)

    baseline, fitting = entries[0], []
    for each in entries:
        if available is None or need(each) <= available:
            fitting.append(each)
        else:
            failures[each.name] = (
                f"needs about {number(need(each) / 2**30)} GiB on {device}, "
                f"where {number(available / 2**30)} GiB can be used"
            )
    if available is not None and baseline not in fitting:
        total = sum(map(math.prod, shapes))
        fits = int(total * available / need(baseline)) // 10**6
        smaller = f"a smaller --model, or --model random --parameters {fits}e6"
        raise MemoryError(
            f"the baseline {baseline.name!r} {failures[baseline.name]}. Free memory"
            + (f", choose a --baseline that stores less, {smaller}" if fits else "")
        )
    return group_entries(fitting, need, available, most)


def needed_bytes(entry: Entry, shapes: Shapes) -> int:
    """An estimate of an entry's peak in bytes, rather too large."""
    numels = [math.prod(shape) for shape in shapes]
    return int(entry.estimate * sum(numels) + entry.scratch * max(numels))


def group_entries(
    entries: Sequence[Entry],
    need: Callable[[Entry], int],
    available: int | None,
    most: int | None = None,
) -> list[list[Entry]]:
    """Group entries that fit into memory together, with the baseline in every group.

    Args:
        entries: the baseline first. Each fits alone.
        need: an entry's peak in bytes.
        available: bytes of memory; None for no bound.
        most: entries in a group; None for no bound.

    Returns:
        Groups in the order of the entries. An entry that does not fit beside the baseline is a
        group of its own.
    """
    baseline, *others = entries
    room = math.inf if available is None else available
    seats = math.inf if most is None else most

    def total(group):
        return sum(map(need, group))

    groups: list[list[Entry]] = []
    alone: list[list[Entry]] = []
    for each in others:
        if need(baseline) + need(each) > room:
            alone.append([each])
        elif groups and len(groups[-1]) < seats and total(groups[-1]) + need(each) <= room:
            groups[-1].append(each)
        else:
            groups.append([baseline, each])
    return [*(groups or [[baseline]]), *alone]
