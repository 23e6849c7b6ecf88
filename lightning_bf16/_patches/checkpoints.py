"""A Trainer saves what it trains, whatever is in the module for the time of a validation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch_bf16
from lightning_bf16.precision import PrecisionMixin

from .weight_averaging import trained_weights

__all__ = ["save_checkpoint"]


def save_checkpoint(original: Callable[..., None]) -> Callable[..., None]:
    """Save the trained weights beside an average, and the averages of schedule-free optimizers.

    Callbacks are asked after the weights were read.
    """

    def _save_checkpoint(trainer: Any, *args: Any, **options: Any) -> None:
        if not isinstance(trainer.precision_plugin, PrecisionMixin):
            original(trainer, *args, **options)
            return
        with trained_weights(trainer), torch_bf16.averaged(*trainer.optimizers):
            original(trainer, *args, **options)

    return _save_checkpoint
