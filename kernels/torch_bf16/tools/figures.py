"""Names for loggers of what several monitors measured."""

from __future__ import annotations

from collections.abc import Sequence

from .monitor import UpdateMonitor

__all__ = ["take_figures"]


def take_figures(monitors: Sequence[UpdateMonitor]) -> dict[str, float]:
    """What monitors measured since the last call, as flat names and numbers for a logger.

    Args:
        monitors: those of a run, in the order of its optimizers.

    Returns:
        ``bf16/survived/<layer>`` and so on of an only monitor; of several,
        ``bf16/optimizer_0/survived/<layer>``, ``bf16/optimizer_1/survived/<layer>`` and so on.
    """
    figures: dict[str, float] = {}
    for number, monitor in enumerate(monitors):
        prefix = f"bf16/optimizer_{number}" if len(monitors) > 1 else "bf16"
        figures |= monitor.take_metrics(prefix)
    return figures
