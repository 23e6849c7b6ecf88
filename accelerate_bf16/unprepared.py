"""Optimizers that step over our bf16 weights and were never given to ``prepare``."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

import torch_bf16

from ._patches import patches

__all__ = ["prepared", "warn_if_unprepared"]

_modes: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""For each bf16 parameter of a prepared model, the mode that it is trained in."""

prepared: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that were prepared, and those about which the user was warned."""


def warn_if_unprepared(mode: str, model: nn.Module) -> None:
    """Warn, once each, when an optimizer steps that nobody prepared, over weights that we cast.

    It would round every update to the nearest bf16, which is what the mode is there to avoid, and
    nothing else would show it.
    """
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16 and parameter.requires_grad:
            _modes[parameter] = mode
    patches.hook(register_optimizer_step_pre_hook, _before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, torch_bf16.BF16Optimizer) or optimizer in prepared:
        return
    # The first of each group, because this runs before every step of every other optimizer.
    firsts = [group["params"][0] for group in optimizer.param_groups if group["params"]]
    mode = next((_modes[each] for each in firsts if each in _modes), None)
    if mode is not None:
        prepared.add(optimizer)
        warnings.warn(
            f"{type(optimizer).__name__} steps over bfloat16 weights of a model that was prepared "
            f"with mixed_precision={mode!r}, and was not prepared itself: it rounds every update "
            "to nearest, and small ones are lost. Give it to accelerator.prepare, which makes it "
            "train in the mode",
            stacklevel=2,
        )
