"""What rounding does to each layer, in the trackers that a script logs to anyway."""

from __future__ import annotations

import os
from typing import Any

import torch_bf16

from .optimizers import inner

__all__ = ["fresh_metrics", "watch"]


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
    if every == 0 or not getattr(accelerator, "trackers", None):
        return
    for optimizer in _ours(accelerator):
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
    found: dict[str, float] = {}
    for number, optimizer in enumerate(_ours(accelerator)):
        for each in optimizer.observers:
            if isinstance(each, _Monitor):
                found |= each.take_metrics(f"bf16_{number}" if number else "bf16")
    return found


class _Monitor(torch_bf16.UpdateMonitor):
    """Ours; the user may have others on the same optimizer."""


def _ours(accelerator: Any) -> list[torch_bf16.BF16Optimizer]:
    found = (inner(each) for each in accelerator._optimizers)
    return [each for each in found if isinstance(each, torch_bf16.BF16Optimizer)]


def _every() -> int:
    value = os.environ.get("BF16_MONITOR", "100")
    if not value.isdecimal():
        raise ValueError(
            f"BF16_MONITOR={value!r} must be the number of steps from one look of the monitor to "
            "the next, or 0 for no monitor"
        )
    return int(value)
