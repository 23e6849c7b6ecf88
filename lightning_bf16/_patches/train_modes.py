"""A Trainer whose optimizers have modes switches them, and saves averages."""

from __future__ import annotations

import functools
from typing import Any

import torch_bf16
from lightning_bf16.train_modes import TrainModesMixin, with_modes

__all__ = ["switch_modes"]


def switch_modes(trainer: Any, optimizers: list[Any], kind: type[TrainModesMixin]) -> None:
    """Give a Trainer the callback that switches, and let its checkpoints hold averages.

    Args:
        trainer: mutated, where an optimizer has modes.
        optimizers: of this fit.
        kind: the callback's class.
    """
    has_callback = any(isinstance(each, TrainModesMixin) for each in trainer.callbacks)
    if with_modes(optimizers) and not has_callback:
        trainer.callbacks.insert(0, kind())
        trainer.save_checkpoint = functools.partial(_save, trainer)


def _save(trainer: Any, *args: Any, **options: Any) -> None:
    with torch_bf16.averaged(*trainer.optimizers):
        type(trainer).save_checkpoint(trainer, *args, **options)
