"""Logs what rounding does to each layer to the trackers that a script already uses."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch

import torch_bf16

from .optimizers import converted_optimizers

__all__ = ["PREFIX", "metrics_of", "watch"]

PREFIX = "bf16"
"""Prefix of the figures' names, before a slash."""


def watch(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Give each of our optimizers a monitor, unless ``BF16_MONITOR`` is 0."""
    every = torch_bf16.monitor_from_environment()
    for optimizer in converted_optimizers(optimizers) if every else ():
        if not any(isinstance(each, _Monitor) for each in optimizer.observers):
            # Refused if gradients are released: steps then run inside backward, one by one.
            with suppress(ValueError):
                _Monitor(optimizer, every=every)


def metrics_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, float]:
    """What the monitors measured since the last call: ``bf16/...``, ``bf16_1/...``, ..."""
    metrics: dict[str, float] = {}
    for number, optimizer in enumerate(converted_optimizers(optimizers)):
        for each in optimizer.observers:
            if isinstance(each, _Monitor):
                metrics |= each.take_metrics(f"{PREFIX}_{number}" if number else PREFIX)
    return metrics


class _Monitor(torch_bf16.UpdateMonitor):
    """A monitor attached here; the user may have added others to the same optimizer."""
