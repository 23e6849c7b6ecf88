"""The Trainer's callback that logs what rounding does to the updates."""

from __future__ import annotations

from typing import Any

import torch_bf16

from ._host import logs_this_step

__all__ = ["MonitorBody"]


class MonitorBody:
    """Stands in front of the Callback class of either package.

    Args:
        every: optimizer steps from one look to the next; None looks at the steps whose metrics the
            loggers get, ``Trainer(log_every_n_steps=...)``.
        sample: at most so many elements of each parameter are looked at.
        warn: whether to say, once per layer, that it stalls and what helps.
    """

    def __init__(self, every: int | None = None, *, sample: int = 4096, warn: bool = True) -> None:
        super().__init__()
        self._options: dict[str, Any] = {"every": every, "sample": sample, "warn": warn}
        self._monitors: list[torch_bf16.UpdateMonitor] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch the optimizers, which are converted by now."""
        self._monitors = [
            torch_bf16.UpdateMonitor(each, **self._options)
            for each in trainer.optimizers
            if isinstance(each, torch_bf16.BF16Optimizer)
        ]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Gradients are there; the update comes next."""
        if self._options["every"] is None and logs_this_step(trainer):
            for monitor in self._monitors:
                monitor.look()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was seen at this batch's step, if it was looked at."""
        for number, monitor in enumerate(self._monitors):
            prefix = f"bf16/optimizer_{number}" if len(self._monitors) > 1 else "bf16"
            if metrics := monitor.take_metrics(prefix):
                pl_module.log_dict(metrics, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop watching."""
        self._stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop watching."""
        self._stop()

    def _stop(self) -> None:
        for monitor in self._monitors:
            monitor.remove()
        self._monitors = []
