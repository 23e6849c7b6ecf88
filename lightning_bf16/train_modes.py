"""Train and eval modes of schedule-free optimizers, switched by a Trainer's callback."""

from __future__ import annotations

from typing import Any

__all__ = ["TrainModesMixin", "switch_modes"]


class TrainModesMixin:
    """Put optimizers that have ``train()`` and ``eval()`` into the mode that the Trainer is in.

    The weights are the average from the start of a validation to the next training batch, so that
    callbacks in between see it, and after the fit.
    """

    # Precedes the Callback class of either package in the bases.

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Switch to train mode."""
        for each in _with_modes(trainer.optimizers):
            each.train()

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        """Switch to eval mode."""
        for each in _with_modes(trainer.optimizers):
            each.eval()

    on_test_start = on_predict_start = on_train_end = on_exception = on_validation_start


def switch_modes(trainer: Any, optimizers: list[Any], kind: type[TrainModesMixin]) -> None:
    """Add the callback that switches modes to a Trainer, if one of its optimizers has modes.

    Args:
        trainer: the Trainer; mutated.
        optimizers: the optimizers of this fit.
        kind: the class of the callback.
    """
    has_callback = any(isinstance(each, TrainModesMixin) for each in trainer.callbacks)
    if _with_modes(optimizers) and not has_callback:
        trainer.callbacks.insert(0, kind())


def _with_modes(optimizers: Any) -> list[Any]:
    """The optimizers that have train and eval modes."""
    return [each for each in optimizers if callable(getattr(each, "eval", None))]
