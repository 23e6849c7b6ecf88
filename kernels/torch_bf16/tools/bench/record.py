"""The record of a run: all figures, with what is needed to read them, ready for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch

from torch_bf16.tools.machine import device_state, hardware, versions
from torch_bf16.tools.output import date

from .clock import clock_for
from .models import Shapes
from .peers import PEERS
from .rounds import Measured, Result

__all__ = ["record", "spread"]

_QUANTILES = {"p10": 10, "median": 50, "p90": 90}


def record(
    measured: Measured,
    setting: Mapping[str, Any],
    shapes: Shapes,
    device: torch.device,
    before: Mapping[str, Any],
    peaks: Mapping[str, int | None] | None = None,
    missing: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Everything about a run as numbers, strings, lists and dicts.

    Args:
        measured: the run.
        setting: the command, and the names of model, backend, baseline and rules.
        shapes: the shapes of the parameters.
        device: the device that it ran on.
        before: the device's state before the run.
        peaks: peak bytes by the entry's name, if they were measured in other processes.
        missing: the package name of each library that is not installed.
    """
    copy = spread(np.array(measured.copy_rates) / 1e9)
    parameters, cache = sum(map(prod, shapes)), clock_for(device).cache_bytes()
    base = next(e.moved for e in measured.results if e.entry.name == setting["baseline"])
    rounds = min(len(each.seconds) for each in measured.results)
    rows = [
        _row(each, parameters, copy["median"], (peaks or {}).get(each.entry.name), base)
        for each in measured.results
    ]
    return {
        "schema": 1,
        "date": date(),
        **setting,
        "rounds": rounds,
        "parameters": parameters,
        "tensors": len(shapes),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "ours": measured.ours,
        "device_state": {"before": before, "after": device_state(device)},
        "hardware": hardware(device),
        "versions": versions([peer.pip for peer in PEERS.values()]),
        "cache_bytes": cache,
        "copy_gb_per_second": copy,
        "groups": measured.groups,
        "interrupted": measured.interrupted,
        "results": rows,
        "failed": measured.failures,
        "missing": dict(missing or {}),
        "notes": _notes(measured, setting["baseline"], cache, rounds),
    }


def _row(
    result: Result, parameters: int, copy: float, peak: int | None, base: int
) -> dict[str, Any]:
    median = float(np.median(result.seconds))
    rate = result.moved / median / 1e9
    after_product = len(result.seconds_after_product) > 0
    peak = result.peak if peak is None else peak
    return {
        "name": result.entry.name,
        "stores": result.entry.stores,
        "ms": spread(result.seconds * 1e3),
        "ratio": spread(result.ratios),
        "ratio_per_byte": spread(result.ratios * base / result.moved),
        "ms_after_product": spread(result.seconds_after_product * 1e3) if after_product else None,
        "ratio_after_product": spread(result.ratios_after_product) if after_product else None,
        "interleaved": result.interleaved,
        "ns_per_element": median / parameters * 1e9,
        "moved_bytes_per_parameter": result.moved / parameters,
        "gb_per_second": rate,
        "share_of_copy": rate / copy,
        "host_ms": spread(result.host_seconds * 1e3),
        "launches": result.launches,
        "bytes_per_parameter": result.held / parameters,
        "peak_bytes_per_parameter": None if peak is None else peak / parameters,
        "first_step_seconds": result.first_step,
        "rounds_ms": [round(float(each) * 1e3, 6) for each in result.seconds],
    }


def spread(values: np.ndarray) -> dict[str, float]:
    """Median, and 10th and 90th percentile."""
    return {name: float(np.percentile(values, q)) for name, q in _QUANTILES.items()}


def _notes(measured: Measured, baseline: str, cache: int | None, rounds: int) -> list[str]:
    notes = []
    if measured.interrupted:
        notes.append(f"interrupted after {rounds} rounds")
    together = [result for result in measured.results if result.interleaved]
    if len(measured.groups) > 1:
        notes.append(
            f"not all fitted into memory together: measured in {len(measured.groups)} groups, "
            + ("each beside the baseline" if len(together) == len(measured.results) else "in turn")
        )
    if alone := [r.entry.name for r in measured.results if not r.interleaved]:
        notes.append(f"ratio to the median of {baseline!r}, not round by round: {', '.join(alone)}")
    if cache:
        small = [r.entry.name for r in measured.results if r.moved < 4 * cache]
        if small:
            notes.append(
                f"a step moves less than four times the last-level cache of {cache / 2**20:.0f} "
                f"MiB, so bandwidth is partly the cache's: {', '.join(small)}"
            )
    return notes
