"""The record of an examination, and its table and sentences for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_bf16.tools.output import number, print_sentences, print_table, share

from .examination import Examination
from .verdict import Finding, Verdict

__all__ = ["record", "show"]


def record(found: Examination, verdict: Verdict, paths: Mapping[str, str]) -> dict[str, Any]:
    """Everything about an examination, ready for JSON."""
    return {
        "schema": 1,
        "kind": "doctor",
        **paths,
        "steps": found.steps,
        "healthy": verdict.healthy,
        "verdict": verdict.sentences,
        "notes": found.notes,
        "weights": [_row(each, found.compared) for each in verdict.findings],
    }


def show(content: Mapping[str, Any], most: int) -> None:
    """Print a record for people.

    Args:
        content: the record.
        most: how many weights the table lists at most.
    """
    steps = "" if content["steps"] is None else f", {content['steps']:,} steps"
    print(" -> ".join(content[key] for key in ("before", "after") if key in content) + steps)
    weights = content["weights"]
    shown = weights[:most]
    columns = ("weight", "verdict", "unmoved", "went", "lost", "half unit", "next update", "below")
    rows = [
        (
            each["name"],
            each["verdict"],
            share(each["unmoved"]),
            number(each["distance"], 2),
            share(each["lost"]),
            number(each["half_unit"], 2),
            number(each["update"], 2),
            share(each["update_below_half_unit"]),
        )
        for each in shown
    ]
    title = f"worst {len(shown)} of {len(weights)} weights" if len(shown) < len(weights) else ""
    print_table(title or f"{len(weights)} weights, worst first", columns, rows)
    print_sentences(content["verdict"], content["notes"])


def _row(each: Finding, compared: bool) -> dict[str, Any]:
    weight, moved, plan = each.weight, each.weight.movement, each.weight.next_update
    return {
        "name": weight.name,
        "shape": list(weight.shape),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "exact_master": weight.master,
        "lacks_master": weight.lacks,
        "hidden_bits": weight.hidden,
        "frozen": weight.frozen,
        "verdict": each.verdict,
        "shown_by": each.why or None,
        "lost": each.lost,
        "unmoved": moved.unmoved if compared else None,
        "below_half_unit": moved.below / moved.numel if compared else None,
        "distance": moved.distance / moved.numel if compared else None,
        "half_unit": moved.half_spacing,
        "exactly_one": moved.ones / moved.numel,
        "nan": moved.nan,
        "infinite": moved.infinite,
        "rounding": weight.rounding,
        "update": None if plan is None else plan.update,
        "update_lost_to_nearest": None if plan is None else 1 - plan.survived,
        "update_below_half_unit": None if plan is None else plan.below,
        "update_not_finite": None if plan is None else plan.broken,
        "lr": None if plan is None else plan.lr,
    }
