"""Peak memory of the benchmark's rows, each in a process of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_bf16.tools.output import say
from torch_bf16.tools.system_memory import peak_growth

from .entries import Entry
from .models import Shapes

__all__ = ["measure_peaks", "peak_bytes"]


def measure_peaks(
    rows: Iterable[Any], peak: Callable[[Any], int | None]
) -> tuple[dict[str, int | None], bool]:
    """Measure rows one by one, now that this process holds no tensors; say of which none is known.

    Args:
        rows: the rows to measure, which have names.
        peak: a row's peak in bytes, or None.

    Returns:
        Bytes by the row's name, and whether Ctrl-C ended it early.
    """
    peaks: dict[str, int | None] = {}
    try:
        for each in rows:
            say(f"{each.name}: measuring peak memory in a process of its own")
            peaks[each.name] = peak(each)
            if peaks[each.name] is None:
                say(f"{each.name}: peak memory could not be measured")
    except KeyboardInterrupt:
        return peaks, True
    return peaks, False


def peak_bytes(entry: Entry, shapes: Shapes, threads: int, seconds: float = 600) -> int | None:
    """Growth of a fresh process's peak memory while an entry is made and takes three CPU steps.

    Args:
        entry: the entry to measure.
        shapes: the shapes of the parameters.
        threads: the number of threads, torch's and ours.
        seconds: how long to wait for the process.

    Returns:
        Bytes, or None if the system does not tell or the process does not finish.
    """
    # What torch.compile makes depends on the shapes, so the first run needs the real ones.
    first = shapes if entry.compiles else [(300, 1024), (1024,)]
    return peak_growth(_three_steps, (entry, first), (entry, shapes), threads, seconds)


def _three_steps(entry: Entry, shapes: Shapes) -> None:
    optimizer = entry.make(shapes, torch.device("cpu"))
    for _ in range(3):
        optimizer.step()
    del optimizer
    gc.collect()
