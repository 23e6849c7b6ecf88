"""A Trainer saves the trained weights, even if a validation has put others into the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch_bf16
from lightning_bf16.precision import PrecisionMixin

from .weight_averaging import trained_weights

__all__ = ["save_checkpoint"]


def save_checkpoint(original: Callable[..., None]) -> Callable[..., None]:
    """Save the trained weights beside an average, and the averages of schedule-free optimizers.

    A callback's hook would come too late: Lightning calls it after it has read the weights.
    """

    def _save_checkpoint(trainer: Any, *args: Any, **options: Any) -> None:
        if not isinstance(trainer.precision_plugin, PrecisionMixin):
            original(trainer, *args, **options)
            return
        with trained_weights(trainer), torch_bf16.averaged(*trainer.optimizers):
            original(trainer, *args, **options)

    return _save_checkpoint
