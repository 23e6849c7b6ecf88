"""Adds the monitor's figures to what the Hugging Face Trainer reports.

Two callbacks enclose the reporting ones (``report_to``): the first adds the figures to the logs,
the second removes them again, so that the console does not fill with layers.
``trainer.state.log_history`` keeps them.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from .modes import in_use

__all__ = ["around"]


def around(reporters: list[Any]) -> list[Any]:
    """Enclose the reporting callbacks in the two that add the figures and remove them.

    Without reporting callbacks nothing is added, unless ``BF16_MONITOR`` is set.
    """
    if not reporters and "BF16_MONITOR" not in os.environ:
        return reporters
    figures = _Figures()
    return [figures, *reporters, _NoFigures(figures)]


class _Figures(TrainerCallback):
    """Attributes: ``added``, the names of the figures in the logs that reporters get now."""

    def __init__(self) -> None:
        self.added: list[str] = []

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        if optimizer and in_use():
            from .monitoring import watch

            watch([optimizer])

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any, optimizer: Any = None, **_: Any
    ) -> None:
        self.added = []
        # Not in the logs of an evaluation or of the whole run, which have no "loss".
        if "loss" in logs and optimizer and in_use():
            from .monitoring import metrics_of

            metrics = {k: v for k, v in metrics_of([optimizer]).items() if k not in logs}
            logs.update(metrics)
            self.added = [*metrics]
            if state.log_history:
                state.log_history[-1].update(metrics)


class _NoFigures(TrainerCallback):
    def __init__(self, figures: _Figures) -> None:
        self._figures = figures

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        # A reporter may have taken some out.
        for name in self._figures.added:
            logs.pop(name, None)
