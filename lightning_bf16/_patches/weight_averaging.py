"""Averages of a bf16 module's weights are fp32, and stay so while they are validated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_bf16 import precision

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

    def _swap_models(callback: Any, pl_module: Any) -> None:
        if not isinstance(pl_module.trainer.precision_plugin, precision.PrecisionMixin):
            original(callback, pl_module)
            return
        weights = _tensors(pl_module)
        # Copy instead of exchanging tensors: version counters and exact masters belong to the
        # module's own tensors.
        values = callback.__dict__.pop("_torch_bf16_weights", None)
        if values is None:
            values = _tensors(callback._average_model.module)
            lent = weights.keys() & values.keys()  # a hook may register buffers after the copy
            callback._torch_bf16_weights = {name: weights[name].clone() for name in lent}
        for name in weights.keys() & values.keys():
            weights[name].copy_(values[name])

    return _swap_models


def _tensors(module: Module) -> dict[str, Tensor]:
    named = chain(module.named_parameters(), module.named_buffers())
    return {name: tensor.data for name, tensor in named}


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
