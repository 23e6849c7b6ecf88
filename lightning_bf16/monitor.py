"""The Trainer's callback that logs what rounding does to the updates."""

from __future__ import annotations

from itertools import chain
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

import torch_bf16
from torch_bf16 import plugin_api

from ._patches.private_attributes import logs_this_step
from .precision import PrecisionMixin

__all__ = ["MonitorMixin"]


class MonitorMixin:
    """Log for each layer what rounding does to the updates, by :class:`torch_bf16.UpdateMonitor`.

    The metrics go through ``self.log``, so that every logger shows them: ``bf16/survived/<layer>``
    (the share of the update that was stored), ``bf16/unmoved/<layer>``, ``bf16/snr/<layer>``,
    ``bf16/gradient_norm`` and ``bf16/skipped_steps``; with several optimizers
    ``bf16/optimizer_0/survived/<layer>`` and so on. A layer that stalls is named in a warning.

    With ``BF16Precision(release_gradients=True)`` it logs nothing, and a warning says so.

    Args:
        every: number of optimizer steps between two measurements; None measures at the steps whose
            metrics the loggers get, ``Trainer(log_every_n_steps=...)``.
        sample: maximum number of elements of each parameter that are measured.
        warn: whether to warn, once per layer, that it stalls, and say what helps.

    Raises:
        ValueError: when training starts: a number is not positive, or the program itself has
            released an optimizer's gradients.

    Example:
        >>> trainer = Trainer(precision="bf16-stochastic", callbacks=[BF16Monitor()])
    """

    # Precedes the Callback class of either package in the bases.

    def __init__(self, every: int | None = None, *, sample: int = 4096, warn: bool = True) -> None:
        super().__init__()
        self._options: dict[str, Any] = {"every": every, "sample": sample, "warn": warn}
        self._monitors: dict[torch_bf16.BF16Optimizer, torch_bf16.UpdateMonitor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start monitoring the optimizers, which have been converted by now."""
        plugin = trainer.precision_plugin
        if isinstance(plugin, PrecisionMixin) and plugin.release is not None:
            rank_zero_warn(
                "BF16Monitor logs nothing in this run: BF16Precision(release_gradients=True) takes "
                "the steps inside the backward pass, parameter by parameter, and callbacks="
                "[BF16Monitor()] looks at whole steps. Leave out one of the two"
            )
            return
        for each in chain(*map(plugin_api.held_optimizers, trainer.optimizers)):
            # One by one: if an optimizer is refused, on_exception removes the monitors so far.
            self._monitors[each] = torch_bf16.UpdateMonitor(each, **self._options)
        if not self._monitors:
            modes = ", ".join(repr(name) for name in torch_bf16.RECIPES)
            rank_zero_warn(
                "BF16Monitor logs nothing in this run: none of its optimizers is one of torch_bf16 "
                f"with precision={trainer.precision!r}. It monitors optimizers with {modes}"
            )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Measure the coming update: gradients are complete, and the step comes next."""
        if self._options["every"] is None and logs_this_step(trainer):
            for each in plugin_api.held_optimizers(optimizer):
                if each in self._monitors:  # no optimizer that a hook has created since
                    self._monitors[each].observe_next_step()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was measured at this batch's step, if anything was."""
        if metrics := torch_bf16.take_figures([*self._monitors.values()]):
            pl_module.log_dict(metrics, on_step=True, on_epoch=False)

    def on_train_end(self, *_: Any) -> None:
        """Stop monitoring."""
        for monitor in self._monitors.values():
            monitor.remove()
        self._monitors = {}

    on_exception = on_train_end
