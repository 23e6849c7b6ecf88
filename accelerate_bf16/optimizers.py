"""Optimizers below Accelerate's wrapper: which ones are ours, and what they train."""

from __future__ import annotations

from collections.abc import Iterable

from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer

import torch_bf16

__all__ = ["converted_optimizers", "trains", "unwrap_optimizer"]


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """The user's optimizer, below Accelerate's wrapper, or the converted one that steps for it.

    SAM and Lookahead leave all steps to a base optimizer. ZeRO's local one takes a part of them.
    """
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    ours = torch_bf16.held_optimizers(optimizer)
    parameters = [set(torch_bf16.parameters_of(each)) for each in (*ours, optimizer)]
    return ours[0] if len(ours) == 1 and parameters[0] == parameters[1] else optimizer


def converted_optimizers(optimizers: Iterable[Optimizer]) -> list[torch_bf16.BF16Optimizer]:
    """The converted ones among optimizers that may be prepared or bare, or inside such ones."""
    return [ours for each in optimizers for ours in torch_bf16.held_optimizers(each)]


def trains(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether an optimizer updates a parameter of a model."""
    return not set(torch_bf16.parameters_of(optimizer)).isdisjoint(model.parameters())
