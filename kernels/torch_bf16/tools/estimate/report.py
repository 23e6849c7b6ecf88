"""The record of an estimate, and how it is printed for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from torch_bf16.tools.output import print_sentences, print_table

from .activations import Activations
from .memory import Memory
from .precisions import Precision
from .sharded import Traffic

__all__ = ["row", "show"]

_DEVICES = (24, 48, 80, 141, 192)
"""Sizes of devices in GB of 10^9 bytes; most hold a few per cent more, for CUDA's context."""


def row(
    precision: Precision,
    alone: Memory,
    measured: Activations | None,
    sharded: tuple[Memory, Traffic] | None,
    passes: bool = False,
    ranks: int = 1,
) -> dict[str, Any]:
    """The record of one precision, in bytes.

    Args:
        precision: the precision.
        alone: its memory on one device.
        measured: what passes hold; None if not measured.
        sharded: its memory on rank 0 of several, and what that rank gathers, reduces and sends;
            None for one device.
        passes: whether a step has several passes.
        ranks: the number of ranks.
    """
    activations = measured and measured.alone(precision, alone.gradients, passes)
    peak = alone.peak(activations or 0)
    found = {
        "precision": precision.name,
        "recipe": None if precision.recipe is None else _formats(precision),
        "released": precision.released,
        "loses_updates": precision.loses,
        **{name: size for name, size in asdict(alone).items() if name != "unsaved"},
        "activations": activations,
        "peak": peak,
        "replica_peak": peak + alone.buckets,
        "fits": _fits_on(peak),
        "checkpoint": alone.saved,
    }
    if sharded is not None:
        part, traffic = sharded
        activations = measured and measured.on_rank(precision, part.gradients, passes, ranks)
        peak = part.peak(traffic.gathered + traffic.reduced + (activations or 0))
        alone_only = {"unsaved", "buckets"}
        each = {name: size for name, size in asdict(part).items() if name not in alone_only}
        found["rank"] = {
            **each,
            "states": part.states,
            "held": part.held,
            "gathered": traffic.gathered,
            "reduced": traffic.reduced,
            "activations": activations,
            "peak": peak,
            "fits": _fits_on(peak),
            "sent_per_step": traffic.sent,
        }
    return found


def show(found: Mapping[str, Any]) -> None:
    """Print an estimate."""
    trained = "" if found["trained"] == found["parameters"] else f", {found['trained']:,} trained"
    print(f"{found['model']}: {found['parameters']:,} parameters{trained}, {found['optimizer']}")
    rows, ranks = found["rows"], found["ranks"]
    names = ["weights", "gradients", "moments", "master", "sums", "staging", "activations", "host"]
    names = [name for name in names if name == "master" or any(each[name] for each in rows)]
    unit, size = ("GB", 10**9) if rows[0]["peak"] > 10**9 else ("MB", 10**6)
    table = []
    cell = partial(_number, unit=size)
    for each in rows:
        cells = [_label(each), *(cell(each[name]) for name in names), cell(each["peak"])]
        replica = [cell(each["replica_peak"])] if ranks > 1 else []
        table.append([*cells, *replica, _device(each["fits"]), cell(each["checkpoint"])])
    replica = ["peak with DDP"] if ranks > 1 else []
    columns = ("precision", *names, "peak", *replica, "fits", "checkpoint")
    print_table(f"{unit} (10^{len(str(size)) - 1} bytes) on one device", columns, table)
    if ranks > 1:
        table = []
        for each in rows:
            rank = each["rank"]
            cells = [_label(each), cell(rank["states"]), cell(rank["held"]), cell(rank["peak"])]
            table.append([*cells, _device(rank["fits"]), cell(rank["sent_per_step"])])
        columns = ("precision", "states", "and gradients", "peak", "fits", "sent per step")
        print_table(f"{unit} on each of {ranks} ranks of fully_shard", columns, table)
    if found["zero"]:
        table = [
            [_label(each), cell(each["stage_1"]), cell(each["stage_3"])] for each in found["zero"]
        ]
        columns = ("precision", "ZeRO-1 and 2", "ZeRO-3")
        title = f"{unit} of weights and states on each of {ranks} ranks of DeepSpeed"
        print_table(title, columns, table)
    print_sentences(found["notes"])


def _label(each: Mapping[str, Any]) -> str:
    # Printed below the row of the same recipe.
    if each.get("released"):
        return "  gradients released"
    return f"{each['precision']} (loses updates)" if each["loses_updates"] else each["precision"]


def _formats(precision: Precision) -> dict[str, str]:
    names = ("weights", "exp_avg", "exp_avg_sq", "accumulate", "reduce", "offload")
    return {name: getattr(precision.recipe, name) for name in names}


def _fits_on(peak: int) -> dict[str, bool]:
    """Which of :data:`_DEVICES` have that much room."""
    return {str(size): peak <= size * 10**9 for size in _DEVICES}


def _device(fits: Mapping[str, bool]) -> str:
    return next((f"{size} GB" for size, room in fits.items() if room), "none")


def _number(count: int | None, unit: int) -> str:
    if count is None:
        return "?"
    value = count / unit
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f}" if count else "-"
