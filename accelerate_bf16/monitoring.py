"""What rounding does to each layer, in the trackers that a script logs to anyway."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

import torch_bf16

from .optimizers import inner

__all__ = ["PREFIX", "fresh_metrics", "metrics_of", "watch", "watch_optimizers"]

PREFIX = "bf16"
"""What the names of figures start with, before a slash."""


def watch(accelerator: Any) -> None:
    """Give each prepared optimizer a monitor, if there is a tracker to log to.

    Args:
        accelerator: an ``Accelerator``; its optimizers keep their monitors.

    Raises:
        ValueError: ``BF16_MONITOR`` is not a number of steps.

    Example:
        >>> watch(accelerator)
    """
    every = _every()
    if every and getattr(accelerator, "trackers", None):
        watch_optimizers(accelerator._optimizers)


def watch_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Give each of our optimizers a monitor, unless ``BF16_MONITOR`` is 0.

    Args:
        optimizers: prepared or bare; others are passed over.

    Raises:
        ValueError: ``BF16_MONITOR`` is not a number of steps.

    Example:
        >>> watch_optimizers([optimizer])
    """
    every = _every()
    for optimizer in _ours(optimizers) if every else ():
        if getattr(optimizer, "_release", None) is not None:
            continue  # its steps run inside backward, one parameter at a time
        if not any(isinstance(each, _Monitor) for each in optimizer.observers):
            _Monitor(optimizer, every=every)


def fresh_metrics(accelerator: Any) -> dict[str, float]:
    """What the monitors have seen since the last call; ``bf16/...``, ``bf16_1/...`` and so on.

    Args:
        accelerator: an ``Accelerator``.

    Example:
        >>> fresh_metrics(accelerator)
        {}
    """
    return metrics_of(accelerator._optimizers)


def metrics_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, float]:
    """Likewise, of some optimizers.

    Example:
        >>> metrics_of([optimizer])
        {}
    """
    found: dict[str, float] = {}
    for number, optimizer in enumerate(_ours(optimizers)):
        for each in optimizer.observers:
            if isinstance(each, _Monitor):
                found |= each.take_metrics(f"{PREFIX}_{number}" if number else PREFIX)
    return found


class _Monitor(torch_bf16.UpdateMonitor):
    """Ours; the user may have others on the same optimizer."""


def _ours(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch_bf16.BF16Optimizer]:
    found = (inner(each) for each in optimizers)
    return [each for each in found if isinstance(each, torch_bf16.BF16Optimizer)]


def _every() -> int:
    value = os.environ.get("BF16_MONITOR", "100")
    if not value.isdecimal():
        raise ValueError(
            f"BF16_MONITOR={value!r} must be the number of steps from one look of the monitor to "
            "the next, or 0 for no monitor"
        )
    return int(value)
