"""The record of whole training steps, and the table made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torch_bf16.tools.machine import hardware, versions
from torch_bf16.tools.output import date, number

from .record import spread
from .report import aligned, bracket
from .training import BASELINE, PHASES, Timed

__all__ = ["training_record", "training_table"]

_COLUMNS = ("ms per step", "ratio", *PHASES, "peak")

_LEGEND = """\
ms per step, ratio: medians, in brackets the 10th and 90th percentile of the rounds; ratio: to the
time of {base!r} in the same round. Then each phase: median ms, and its ratio to the same phase of
{base!r}. peak: bytes per parameter, activations included: on a CPU at the peak of a process of its
own that made the model in fp32 and took three steps, on a GPU at the peak of a step. Gradients
reach the optimizer in the dtype of the weights: bfloat16 in ours, float32 in torch's."""


def training_record(
    timed: Sequence[Timed],
    setting: Mapping[str, Any],
    device: torch.device,
    peaks: Mapping[str, int | None],
    product_ratio: float | None,
) -> dict[str, Any]:
    """Everything about a run as numbers, strings, lists and dicts.

    Args:
        timed: the measured rows, the baseline first.
        setting: the run's setting: command, layers, tokens, threads, rounds.
        device: the device that it ran on.
        peaks: peak bytes by the row's name, where they were not measured with the steps.
        product_ratio: time of bf16 matrix products over that of fp32 ones; None on a GPU.
    """
    return {
        "schema": 1,
        "kind": "training",
        "date": date(),
        **setting,
        "hardware": hardware(device),
        "versions": versions(),
        "bf16_product_ratio": product_ratio,
        "results": [_row(each, timed[0], peaks.get(each.row.name, each.peak)) for each in timed],
    }


def _row(each: Timed, base: Timed, peak: int | None) -> dict[str, Any]:
    phases = {name: np.array(each.seconds[name]) for name in PHASES}
    return {
        "name": each.row.name,
        "parameters": each.parameters,
        "ms": spread(each.totals * 1e3),
        "ratio": spread(each.totals / base.totals),
        "phases": {
            name: {
                "ms": spread(seconds * 1e3),
                "ratio": spread(seconds / np.array(base.seconds[name])),
            }
            for name, seconds in phases.items()
        },
        "peak_bytes_per_parameter": None if peak is None else peak / each.parameters,
        "last_loss": each.loss,
        "rounds_ms": [round(float(total) * 1e3, 3) for total in each.totals],
    }


def training_table(record: Mapping[str, Any]) -> str:
    """Format a record for people, as plain text."""
    rows, place = record["results"], record["hardware"]
    where = place.get("device", f"{place['processor']}, {record['threads']} threads")
    lines = [
        f"training steps of GPT-2's shape, {record['layers']} layers: "
        f"{rows[0]['parameters']:,} parameters, {record['tokens']} tokens, on {where}, "
        f"{record['rounds']} interleaved rounds",
        "",
    ]
    cells = {"": [*_COLUMNS]}
    for row in rows:
        phases = (row["phases"][name] for name in PHASES)
        peak = row["peak_bytes_per_parameter"]
        cells[row["name"]] = [
            *(bracket(row["ms"]), bracket(row["ratio"])),
            *(f"{number(p['ms']['median'])} {number(p['ratio']['median'])}" for p in phases),
            "-" if peak is None else f"{peak:.2f}",
        ]
    lines += aligned(cells)
    if record["bf16_product_ratio"] is not None:
        lines += [
            "",
            f"bf16 matrix products: {number(record['bf16_product_ratio'])} of fp32's time",
        ]
    return "\n".join([*lines, "", _LEGEND.format(base=BASELINE)])
