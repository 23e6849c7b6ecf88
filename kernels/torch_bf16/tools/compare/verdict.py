"""Judge the figures of a comparison, and say in sentences what they mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch_bf16.tools.sampling import STALLING

__all__ = ["BAD", "HIGHER", "LOWER", "decimals_of", "ends_near", "judge"]

REFERENCE, FINE, LOSES = "reference", "as good", "loses"
STALLS, BROKEN, UNDECIDED = "stalls", "broken", "one pair"
BAD = (LOSES, STALLS, BROKEN)
LOWER, HIGHER = "lower", "higher"
# Shares of the reference's improvement that count as lost: over several pairs, and in a single one.
_LOST, _LOST_ALONE = 0.002, 0.05
_MOST_SENTENCES = 3
_DECIMALS = 4


def judge(found: dict[str, Any]) -> None:
    """Give every row of the figures a ``verdict``, and the whole its sentences.

    Args:
        found: the result of ``analyse()``, with ``better``, which says of what is measured whether
            lower or higher is better. ``verdict`` of each row, ``sentences`` and ``healthy`` are
            added.
    """
    reference = next(row for row in found["rows"] if row["name"] == found["reference"])
    sentences = []
    for row in found["rows"]:
        row["stalled"] = _stalled_layers(row)
        row["verdict"] = _verdict(row, row is reference, found)
    near = [row for row in found["rows"] if row["verdict"] == FINE]
    pairs = max(row["pairs"] for row in found["rows"])
    if near:
        verb = "end" if len(near) > 1 else "ends"
        good = _join([row["name"] for row in near])
        sentences.append(f"{good} {verb} {ends_near(found)}")
    for kind in (BROKEN, STALLS, LOSES):
        sentences += [_sentence(row, found) for row in found["rows"] if row["verdict"] == kind]
    if len(near) > _MOST_SENTENCES:
        # Among many rows, differences that chance explains are left to the table.
        near = [row for row in near if not _by_chance(row["against"])]
    sentences += [_sentence(row, found) for row in near]
    alone = [row for row in found["rows"] if row["verdict"] == UNDECIDED and row["against"]]
    if alone:
        digits = decimals_of(found)
        each = ", ".join(f"{row['name']} {row['against']['mean']:+.{digits}f}" for row in alone)
        sentences.append(f"one pair cannot tell whether these are chance: {each}")
    if 1 < pairs < 4:
        sentences.append(
            f"with {pairs} pairs the 95 % interval is wide; five or more make it narrower"
        )
    found["sentences"] = sentences
    found["healthy"] = not any(row["verdict"] in BAD for row in found["rows"])


def decimals_of(found: Mapping[str, Any]) -> int:
    """How many decimals tell apart what is judged: more for a loss that improves by millionths."""
    known = [found["improvement"], *(row["final"] for row in found["rows"])]
    size = next((abs(each) for each in known if each), 1.0)
    return max(_DECIMALS, _DECIMALS - 1 - math.floor(math.log10(size)))


def ends_near(found: Mapping[str, Any]) -> str:
    """Where the rows end that do not lose: where the reference does, or on the better side of it.

    Args:
        found: what :func:`judge` has judged.
    """
    near = [row for row in found["rows"] if row["verdict"] == FINE]
    if all(_by_chance(row["against"]) or _excess(row, found) > 0 for row in near):
        return f"where {found['reference']} ends"
    worse = HIGHER if found["better"] == LOWER else LOWER
    return f"no {worse} than {found['reference']}"


def _excess(row: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    """How much worse than the reference a row ends."""
    mean = row["against"]["mean"]
    return mean if found["better"] == LOWER else -mean


def _verdict(row: Mapping[str, Any], is_reference: bool, found: Mapping[str, Any]) -> str:
    if row["broken"]:
        return BROKEN
    if row["stalled"]:
        return STALLS
    if is_reference:
        return REFERENCE
    against = row["against"]
    if against is None:
        return UNDECIDED
    worse, improvement = _excess(row, found), found["improvement"] or 0.0
    if row["pairs"] == 1:
        return LOSES if worse > _LOST_ALONE * improvement > 0 else UNDECIDED
    lost = worse > _LOST * max(improvement, 0.0)
    return LOSES if lost and not _by_chance(against) else FINE


def _stalled_layers(row: Mapping[str, Any]) -> list[str]:
    """Layers that stored less than half of their updates, and not by chance."""
    if row["undecoded"]:
        return []
    return [
        name
        for name, layer in row["layers"].items()
        if layer["survived"] is not None
        and layer["survived"] < STALLING
        and (layer["survived_at_most"] or 0.0) < STALLING
    ]


def _sentence(row: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    name, against = row["name"], row["against"]
    if row["broken"]:
        runs = ", ".join(f"seed {seed} at step {step}" for seed, step in row["broken"].items())
        return f"{name} is broken: its loss is no longer a number ({runs})"
    parts = []
    if against is not None:
        parts.append(f"ends {_difference(against, decimals_of(found))}")
        if row["verdict"] == LOSES and row["learned"] is not None:
            parts.append(f"{row['learned']:.1%} of what {found['reference']} learned")
    if row["verdict"] == STALLS:
        layers = row["stalled"]
        some = _join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")
        worst = min(row["layers"][layer]["survived"] for layer in layers)
        parts.append(
            f"rounding loses more than half of the updates of {some} (down to {worst:.0%} kept)"
        )
    if row["unmoved"] and row["unmoved"] >= 0.005 and not row["undecoded"]:
        parts.append(f"{row['unmoved']:.0%} of its elements never moved")
    return f"{name} {'; '.join(parts)}" if parts else f"{name} has nothing to compare"


def _difference(against: Mapping[str, Any], digits: int) -> str:
    mean, low, high = against["mean"], against["low"], against["high"]
    where = "above" if mean > 0 else "below"
    if low is None:
        return f"{abs(mean):.{digits}f} {where}"
    interval = f"95 % interval {low:+.{digits}f} to {high:+.{digits}f}"
    if _by_chance(against):
        return f"{mean:+.{digits}f} away, {interval}, which chance explains"
    return f"{abs(mean):.{digits}f} {where}, {interval}"


def _by_chance(against: Mapping[str, Any]) -> bool:
    return against["low"] is not None and against["low"] <= 0 <= against["high"]


def _join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
