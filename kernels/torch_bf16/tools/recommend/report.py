"""The record of a recommendation, and how it is printed for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch_bf16.tools.estimate.memory import Memory
from torch_bf16.tools.estimate.shapes import ModelShapes
from torch_bf16.tools.output import number, print_sentences, print_table, share
from torch_bf16.tools.sampling import STALLING

from .lines import launch_line, lines, literal, without_variable
from .observation import Observation
from .ranges import ranges
from .reasons import megabytes, reasons
from .updates import BITS, Layer
from .verdict import DISTANCE, LAYER_DISTANCE, Candidate, Verdict

__all__ = ["record", "rounded", "show"]

_NEAREST = "bf16-true"


def record(
    command: str,
    found: Observation,
    verdict: Verdict,
    shapes: ModelShapes,
    held: Mapping[str, Memory],
    notes: list[str],
) -> dict[str, Any]:
    """Everything about a recommendation, ready for JSON.

    Args:
        command: the command that starts the training, or the name of a factory.
        found: what was observed.
        verdict: what follows from it.
        shapes: the shapes of the models.
        held: the memory that each precision takes.
        notes: caveats for the user.
    """
    rates = [abs(lr) for run in found.rates for row in run for lr in row if not math.isnan(lr)]
    kept = {"keep_fp32": found.models.kept} if found.models.kept else {}
    chosen = replace(verdict.chosen, options={**verdict.chosen.options, **kept})
    peak, total = max(rates, default=None), max(len(each) for each in found.rates)
    content = {
        "schema": 1,
        "kind": "recommend",
        "command": command,
        "host": found.host.name,
        "optimizers": [type(each).__name__ for each in found.optimizers],
        "steps": max(found.steps),
        "observed_steps": found.observed_steps,
        "total_steps": total,
        "lr": peak,
        "parameters": shapes.numel,
        "trained": shapes.trained,
        # Paths over spacings: a few weights at 0, as of LoRA, would outweigh a mean of shares.
        "spacings_per_step": rounded(verdict).spacings() / total,
        "thresholds": {"distance": DISTANCE, "layer_distance": LAYER_DISTANCE},
        "recommended": verdict.chosen.name,
        "lines": lines(found.host.name, chosen, command),
        "launch": launch_line(found.host.name, chosen, command),
        "recipes": _recipes(verdict, held, peak),
        "layers": [_layer(each, total) for each in verdict.layers],
        "ranges": ranges(verdict, found.models.passing),
        "notes": [*notes, *_notes(found)],
    }
    return {**content, "reasons": reasons(content)}


def _notes(found: Observation) -> list[str]:
    notes = []
    if found.converted:
        notes.append(
            f"{', '.join(found.converted)} steps over bf16 weights, so what it intends is lost "
            "before it can be seen: it was converted to exact masters from its second step on"
        )
    if found.caught:
        notes.append(
            "the script catches even the exception that ends it, by `except:` or `except "
            "BaseException:`, and went on until its next step or its own end; `except Exception:` "
            "lets it pass"
        )
    if kept := found.models.kept:
        unsaid = without_variable(kept)
        notes.append(
            f"what keep_fp32={literal(kept)} keeps in fp32 was judged as such, so the "
            "lines to write repeat it"
            + (f"; a shell's variable cannot say {literal(unsaid)}" if unsaid else "")
        )
    if found.infinite:
        notes.append(f"{found.infinite} steps with gradients that are not finite were left out")
    if found.unseen:
        notes.append(
            f"{len(found.unseen)} weights were not measured: what their optimizer writes is not "
            "known in advance"
        )
    return notes


def rounded(verdict: Verdict) -> Layer:
    """All matrices that a recipe can round; everything if there is none."""
    found = [p for p in verdict.everything.parameters if not p.is_exact]
    return Layer("all matrices", tuple(found)) if found else verdict.everything


def _recipes(
    verdict: Verdict, held: Mapping[str, Memory], peak: float | None
) -> list[dict[str, Any]]:
    rows = [
        {
            "name": name,
            "weights": None,
            "loses": name == _NEAREST,
            "lost_updates": 1 - verdict.everything.nearest() if name == _NEAREST else 0.0,
            "distance": None,
            "noise": None,
            "worst_layer": None,
            "loses_below_lr": None,
            **_bytes(held[name]),
        }
        for name in (_NEAREST, "bf16-mixed", "32-true")
    ]
    candidates = [_recipe(each, held[each.name], peak) for each in verdict.candidates]
    return [rows[0], *candidates, *rows[1:]]


def _recipe(each: Candidate, held: Memory, peak: float | None) -> dict[str, Any]:
    finite = math.isfinite(each.distance)
    return {
        "name": each.name,
        "weights": each.recipe.weights,
        "loses": each.loses,
        "lost_updates": 0.0,
        "distance": each.distance if finite else None,
        "noise": each.noise,
        "worst_layer": None if each.worst is None else each.worst[0],
        "loses_below_lr": peak * each.needed if peak is not None and finite else None,
        **_bytes(held),
    }


def _bytes(held: Memory) -> dict[str, int]:
    return {"bytes": held.held, "peak_bytes": held.peak()}


def _layer(each: Layer, steps: int) -> dict[str, Any]:
    exact = all(p.is_exact for p in each.parameters)
    distances = {name: each.distance(name) for name in BITS} if each.moves and not exact else {}
    return {
        "name": each.name,
        "elements": each.elements,
        "exact": exact,
        "update_per_lr": each.update(),
        "spacings_per_step": each.spacings() / steps,
        "spacings": each.spacings(),
        "lost_to_nearest": 1 - each.nearest(),
        "distance": {
            name: found if math.isfinite(found) else None for name, found in distances.items()
        },
    }


def show(content: Mapping[str, Any], most: int) -> None:
    """Print a record for people.

    Args:
        content: the record.
        most: how many layers the table lists at most.
    """
    optimizers, lr = ", ".join(content["optimizers"]), content["lr"]
    at = "" if lr is None else f" at lr {lr:.3g}"
    print(
        f"{content['command']}: {content['trained']:,} weights by {optimizers}{at}, "
        f"{content['observed_steps']} of {content['steps']} steps observed, "
        f"{content['total_steps']:,} steps in all"
    )
    columns = ("recipe", "MB", "peak", "noise / drift", "S", "loses below lr", "")
    print_table("recipes, by memory", columns, [_recipe_cells(each) for each in content["recipes"]])
    layers = content["layers"]
    title = f"layers, the most exposed first: {min(most, len(layers))} of {len(layers)}"
    columns = ("layer", "weights", "spacings/step", "lost to nearest", "S bf16", "S bf16+8")
    print_table(title, columns, [_layer_cells(each) for each in layers[:most]])
    ranges_ = content["ranges"]
    columns = ("format", "gradients to zero", "the same, scaled", "overflows", "product off by")
    rows = [
        (
            *(name, share(each["gradients_to_zero"]), share(each["scaled_to_zero"])),
            *(", ".join(each["overflows"][:2]) or "-", share(each["product_error"])),
        )
        for name, each in ranges_["formats"].items()
    ]
    print_table("what products and gradients in a format would lose", columns, rows)
    print_sentences(content["reasons"], content["notes"])
    print("\nWhat to write:\n")
    for line in content["lines"]:
        print(f"    {line}")
    if content["launch"]:
        print(f"\nOr, without changing the script:\n\n    {content['launch']}")


def _recipe_cells(each: Mapping[str, Any]) -> tuple[str, ...]:
    verdict = "stalls" if 1 - each["lost_updates"] <= STALLING else "loses" if each["loses"] else ""
    return (
        *(each["name"], megabytes(each["bytes"]), megabytes(each["peak_bytes"])),
        *(share(each["noise"]), number(each["distance"], 2), number(each["loses_below_lr"], 2)),
        verdict,
    )


def _layer_cells(each: Mapping[str, Any]) -> tuple[str, ...]:
    found = each["distance"]
    cells = ("exact",) * 2 if each["exact"] else tuple(number(found.get(n), 2) for n in BITS)
    step, lost = number(each["spacings_per_step"], 2), share(each["lost_to_nearest"])
    return (each["name"], f"{each['elements']:,}", step, lost, *cells)
