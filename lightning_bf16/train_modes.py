"""Schedule-free optimizers of a Trainer: weights for training, and their average for all else."""

from __future__ import annotations

from typing import Any

__all__ = ["TrainModesMixin", "switch_modes"]


class TrainModesMixin:
    """Put optimizers with ``train()`` and ``eval()`` into the mode of what the Trainer does.

    The average stays from the start of a validation to the next training batch, so that callbacks
    in between see it, and after the fit.
    """

    # Stands in front of the Callback class of either package.

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Train mode; nothing where it is."""
        for each in _with_modes(trainer.optimizers):
            each.train()

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        """Eval mode; nothing where it is."""
        for each in _with_modes(trainer.optimizers):
            each.eval()

    on_test_start = on_predict_start = on_train_end = on_exception = on_validation_start


def switch_modes(trainer: Any, optimizers: list[Any], kind: type[TrainModesMixin]) -> None:
    """Give a Trainer the callback that switches, where an optimizer has modes.

    Args:
        trainer: mutated.
        optimizers: of this fit.
        kind: the callback's class.
    """
    has_callback = any(isinstance(each, TrainModesMixin) for each in trainer.callbacks)
    if _with_modes(optimizers) and not has_callback:
        trainer.callbacks.insert(0, kind())


def _with_modes(optimizers: Any) -> list[Any]:
    """Those of a Trainer's optimizers that have modes."""
    return [each for each in optimizers if callable(getattr(each, "eval", None))]
