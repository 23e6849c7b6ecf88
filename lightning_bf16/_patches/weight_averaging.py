"""Averages of a bf16 module's weights are fp32, and stay so while it is validated with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from lightning_bf16.precision import PrecisionBody

__all__ = ["setup", "swap_models"]


def setup(original: Callable[..., None]) -> Callable[..., None]:
    """Let the average that the callback makes see the module's weights in its own dtypes.

    torch's functions for many tensors at once take one dtype only.
    """

    def _setup(callback: Any, trainer: Any, pl_module: Any, stage: str) -> None:
        original(callback, trainer, pl_module, stage)
        # A run that was broken off in a validation has left what the next one must not put back.
        vars(callback).pop("_torch_bf16_weights", None)
        average = callback._average_model
        if average is not None and isinstance(trainer.precision_plugin, PrecisionBody):
            average.update_parameters = partial(_update, average)

    return _setup


def _update(average: Any, model: Any) -> None:
    type(average).update_parameters(average, _InDtypesOf(average.module, model))


class _InDtypesOf:
    """What is read of a model to average it, in the dtypes of the average."""

    def __init__(self, average: Any, model: Any) -> None:
        self.average, self.model = average, model

    def parameters(self) -> Iterator[Tensor]:
        return self._cast(self.model.parameters(), self.average.parameters())

    def buffers(self) -> Iterator[Tensor]:
        return self._cast(self.model.buffers(), self.average.buffers())

    def _cast(self, current: Iterable[Tensor], averages: Iterable[Tensor]) -> Iterator[Tensor]:
        for each, average in zip(current, averages, strict=True):
            yield each.detach().to(average.dtype)


def swap_models(original: Callable[..., None]) -> Callable[..., None]:
    """Keep the average where it is during a validation, and lend the module a copy.

    The callback swaps the two; through bf16 parameters the average would come back rounded.
    """

    def _swap_models(callback: Any, module: Any) -> None:
        if not isinstance(module.trainer.precision_plugin, PrecisionBody):
            original(callback, module)
            return
        average = callback._average_model.module
        averages, weights = ((*m.parameters(), *m.buffers()) for m in (average, module))
        # Copies, no exchange of tensors: a version counter and exact masters hang on the module's.
        values = callback.__dict__.pop("_torch_bf16_weights", None)
        if values is None:
            callback._torch_bf16_weights = [current.data.clone() for current in weights]
            values = [average.data for average in averages]
        for current, value in zip(weights, values, strict=True):
            current.data.copy_(value)

    return _swap_models
