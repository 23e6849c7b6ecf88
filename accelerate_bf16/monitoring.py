"""Logs what rounding does to each layer to the trackers that a script already uses."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch

import torch_bf16

from .optimizers import converted_optimizers

__all__ = ["metrics_of", "watch"]


def watch(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Give each of our optimizers a monitor, unless ``BF16_MONITOR`` is 0."""
    every = torch_bf16.monitor_from_environment()
    for optimizer in converted_optimizers(optimizers) if every else ():
        if not any(isinstance(each, _Monitor) for each in optimizer.observers):
            # Refused if gradients are released: steps then run inside backward, one by one.
            with suppress(ValueError):
                _Monitor(optimizer, every=every)


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
