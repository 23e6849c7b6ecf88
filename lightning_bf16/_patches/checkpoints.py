"""The weights that a Trainer saves and loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torch_bf16
from lightning_bf16 import precision
from torch_bf16 import plugin_api

from .private_attributes import widen_averages
from .weight_averaging import trained_weights

__all__ = ["load_model_state_dict", "save_checkpoint"]


def save_checkpoint(original: Callable[..., None]) -> Callable[..., None]:
    """Save the trained weights beside an average, and the averages of schedule-free optimizers.

    A callback's hook would come too late: Lightning calls it after it has read the weights.
    """

    def _save_checkpoint(trainer: Any, *args: Any, **options: Any) -> None:
        if not isinstance(trainer.precision_plugin, precision.PrecisionMixin):
            original(trainer, *args, **options)
            return
        with trained_weights(trainer), torch_bf16.averaged(*trainer.optimizers):
            original(trainer, *args, **options)

    return _save_checkpoint


def load_model_state_dict(original: Callable[..., None]) -> Callable[..., None]:
    """Before a module that is already bf16 loads weights, cast it by this fit's recipe.

    A fresh module keeps all bits of the fp32 weights that it loads. A module that a validation, or
    a run in another precision, has left in bf16 would round them before the plugin sees it. So
    would callbacks' averages of it, which load right afterwards: they are made fp32 here.
    """

    def _load_model_state_dict(strategy: Any, *args: Any, **kwargs: Any) -> None:
        plugin, module = strategy.precision_plugin, strategy.lightning_module
        ours = isinstance(plugin, precision.PrecisionMixin) and module.trainer.state.fn == "fit"
        if ours and any(p.dtype == torch.bfloat16 for p in plugin_api.parameters_in(module)):
            plugin.cast(module)
            widen_averages(module.trainer)
        original(strategy, *args, **kwargs)

    return _load_model_state_dict
