"""Optimizers below Accelerate's wrapper: which ones are ours, and what they train."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

import torch_bf16
from torch_bf16 import plugin_api

__all__ = ["converted_optimizers", "trained_models", "unwrap_optimizer"]


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """The user's optimizer, below Accelerate's wrapper, or the converted one that steps for it.

    SAM and Lookahead leave all steps to a base optimizer. ZeRO's local one takes a part of them.
    """
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    ours = plugin_api.held_optimizers(optimizer)
    same = len(ours) == 1 and _parameters(ours[0]) == _parameters(optimizer)
    return ours[0] if same else optimizer


def converted_optimizers(optimizers: Iterable[Optimizer]) -> list[torch_bf16.BF16Optimizer]:
    """The converted ones among optimizers that may be prepared or bare, or inside such ones."""
    return [ours for each in optimizers for ours in plugin_api.held_optimizers(each)]


def trained_models(
    optimizers: Iterable[Optimizer], models: Sequence[nn.Module]
) -> list[dict[int, nn.Module]]:
    """For each optimizer, the models of which it updates a parameter, by their numbers.

    For all at once, because a model takes long to list its parameters. Wrapping replaces some, so
    that the answer holds only until then.
    """
    holders: dict[int, list[int]] = {}
    for number, model in enumerate(models):
        for parameter in plugin_api.parameters_in(model):
            holders.setdefault(id(parameter), []).append(number)
    found = []
    for optimizer in optimizers:
        ids = map(id, plugin_api.parameters_of(optimizer))
        numbers = {number for each in ids for number in holders.get(each, ())}
        found.append({number: models[number] for number in sorted(numbers)})
    return found


def _parameters(optimizer: Optimizer) -> set[Tensor]:
    return set(plugin_api.parameters_of(optimizer))
