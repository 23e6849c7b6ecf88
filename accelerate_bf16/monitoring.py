"""Logs what rounding does to each layer to the trackers that a script already uses."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable

import torch
from accelerate.state import PartialState

import torch_bf16
from torch_bf16 import plugin_api

from .optimizers import converted_optimizers
from .report import show

__all__ = ["metrics_of", "watch"]

_refused: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def watch(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Give each of our optimizers a monitor, unless ``BF16_MONITOR`` is 0.

    One that releases gradients gets none, which is said if ``BF16_MONITOR`` is set.
    """
    every = plugin_api.monitor_from_environment()
    for optimizer in converted_optimizers(optimizers) if every else ():
        if any(isinstance(each, _Monitor) for each in optimizer.observers):
            continue
        try:
            _Monitor(optimizer, every=every)
        except ValueError as error:
            asked = os.environ.get("BF16_MONITOR", "").strip()
            if asked and optimizer not in _refused and PartialState().is_main_process:
                _refused.add(optimizer)
                kind = type(optimizer).__name__
                show(f"BF16_MONITOR={asked} logs no figures of {kind}: {error}")


def metrics_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, float]:
    """What the monitors measured since the last call, by :func:`torch_bf16.take_figures`."""
    return torch_bf16.take_figures(
        [
            each
            for optimizer in converted_optimizers(optimizers)
            for each in optimizer.observers
            if isinstance(each, _Monitor)
        ]
    )


class _Monitor(torch_bf16.UpdateMonitor):
    """A monitor attached here; the user may have added others to the same optimizer."""
