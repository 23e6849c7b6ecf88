"""Averages of weights stay fp32 while a bf16 module is validated with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning_bf16.precision import PrecisionBody

from .replacements import replacements

__all__ = ["patch_weight_averaging"]


def patch_weight_averaging(callbacks: Iterable[Any]) -> None:
    """Keep the averages of ``WeightAveraging`` callbacks where they are during a validation.

    The callback swaps average and module for that time; through bf16 parameters the average would
    come back rounded, each time.
    """
    for callback in callbacks:
        for owner in type(callback).__mro__:
            if "_swap_models" in vars(owner):
                replacements.wrap(owner, "_swap_models", _lend_average)


def _lend_average(callback: Any, original: Callable[[Any], Any], module: Any) -> None:
    if not isinstance(module.trainer.precision_plugin, PrecisionBody):
        original(module)
        return
    averages, own = (
        (*each.parameters(), *each.buffers()) for each in (callback._average_model.module, module)
    )
    # Copies, and no exchange of tensors: a version counter and exact masters hang on the module's.
    values = callback.__dict__.pop("_torch_bf16_lent", None)
    if values is None:
        callback._torch_bf16_lent = [current.data.clone() for current in own]
        values = [average.data for average in averages]
    for current, value in zip(own, values, strict=True):
        current.data.copy_(value)
