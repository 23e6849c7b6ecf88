"""What rounding does to each layer, in the trackers that a script logs to anyway."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch

import torch_bf16

from .optimizers import converted_optimizers

__all__ = ["PREFIX", "metrics_of", "watch"]

PREFIX = "bf16"
"""What the names of figures start with, before a slash."""


def watch(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Give each of our optimizers a monitor, unless ``BF16_MONITOR`` is 0."""
    every = torch_bf16.monitor_from_environment()
    for optimizer in converted_optimizers(optimizers) if every else ():
        if not any(isinstance(each, _Monitor) for each in optimizer.observers):
            # Where gradients are released, steps run inside backward, one parameter at a time.
            with suppress(ValueError):
                _Monitor(optimizer, every=every)


def metrics_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, float]:
    """What their monitors have seen since the last call; ``bf16/...``, ``bf16_1/...`` and so on."""
    metrics: dict[str, float] = {}
    for number, optimizer in enumerate(converted_optimizers(optimizers)):
        for each in optimizer.observers:
            if isinstance(each, _Monitor):
                metrics |= each.take_metrics(f"{PREFIX}_{number}" if number else PREFIX)
    return metrics


class _Monitor(torch_bf16.UpdateMonitor):
    """Ours; the user may have others on the same optimizer."""
