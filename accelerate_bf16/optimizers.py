"""Optimizers below Accelerate's wrapper: which ones are ours, and what they train."""

from __future__ import annotations

from collections.abc import Iterable

from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer

import torch_bf16

__all__ = ["converted_optimizers", "trains", "unwrap_optimizer"]


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """The user's optimizer, below Accelerate's wrapper, or the converted one inside it.

    SAM, for example, shares the groups of a base optimizer, which takes the steps and may have been
    converted already.
    """
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    for each in vars(optimizer).values():
        same = getattr(each, "param_groups", None) is optimizer.param_groups
        if same and isinstance(each, torch_bf16.BF16Optimizer):
            return each
    return optimizer


def converted_optimizers(optimizers: Iterable[Optimizer]) -> list[torch_bf16.BF16Optimizer]:
    """The converted ones among optimizers that may be prepared or bare."""
    unwrapped = map(unwrap_optimizer, optimizers)
    return [each for each in unwrapped if isinstance(each, torch_bf16.BF16Optimizer)]


def trains(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether an optimizer updates a parameter of a model."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in trained for parameter in model.parameters())
