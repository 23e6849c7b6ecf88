"""Averages of a bf16 module's weights are fp32, and stay so while they are validated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_bf16.precision import PrecisionMixin

__all__ = ["setup", "swap_models", "trained_weights"]


def setup(original: Callable[..., None]) -> Callable[..., None]:
    """Drop weights set aside by an interrupted validation, so that no later run restores them."""

    def _setup(callback: Any, trainer: Any, pl_module: Any, stage: str) -> None:
        original(callback, trainer, pl_module, stage)
        vars(callback).pop("_torch_bf16_weights", None)

    return _setup


def swap_models(original: Callable[..., None]) -> Callable[..., None]:
    """Keep the average in place during a validation, and lend the module a copy.

    The callback swaps the two; passing through bf16 parameters would round the average.
    """

    def _swap_models(callback: Any, module: Any) -> None:
        if not isinstance(module.trainer.precision_plugin, PrecisionMixin):
            original(callback, module)
            return
        average = callback._average_model.module
        averages, weights = ((*m.parameters(), *m.buffers()) for m in (average, module))
        # Copy instead of exchanging tensors: version counters and exact masters belong to the
        # module's own tensors.
        values = callback.__dict__.pop("_torch_bf16_weights", None)
        if values is None:
            callback._torch_bf16_weights = [current.data.clone() for current in weights]
            values = [average.data for average in averages]
        for current, value in zip(weights, values, strict=True):
            current.data.copy_(value)

    return _swap_models


@contextmanager
def trained_weights(trainer: Any) -> Iterator[None]:
    """A context in which the module has the weights that it trains, even during a validation.

    A checkpoint has them nowhere else, and the remainders of exact masters only fit these weights.
    """
    lending = [each for each in trainer.callbacks if "_torch_bf16_weights" in vars(each)]
    for each in reversed(lending):
        each._swap_models(trainer.lightning_module)
    try:
        yield
    finally:
        for each in lending:
            each._swap_models(trainer.lightning_module)
