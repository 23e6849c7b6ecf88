"""Steps that bf16 to nearest loses: how far weights go in a host, beside those of fp32 masters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed_training import start, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_bf16 import deepspeed_config

LR, STEPS = 1e-5, 100
MASTERS, NEAREST, OURS = "fp32 masters", "DeepSpeed's flags", "bf16-stochastic"


def network() -> nn.Module:
    """Enough elements that the mean of their noise is about a hundredth of the way they go."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 64))


def loader() -> DataLoader:
    """As many batches as there are steps, the same on each rank if nobody splits them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16 * STEPS, 64, generator=generator)
    return DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=16)


def config(way: str, stage: int) -> dict[str, Any]:
    """A configuration of DeepSpeed: its own with masters, with its two flags, and a user's."""
    settings = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    return deepspeed_config(settings) if way == NEAREST else settings


def ways(train: Callable[[str], Any]) -> dict[str, float]:
    """How far along the way of fp32 masters the matrices went; 1 is as far.

    Args:
        train: trains :func:`network` in one of three ways and returns its engine.
    """
    before = {name: each.detach().bfloat16() for name, each in network().named_parameters()}
    matrices = [name for name, each in before.items() if each.ndim > 1]

    def gone(after: dict[str, torch.Tensor]) -> torch.Tensor:
        names = {name.removeprefix("network."): each for name, each in after.items()}
        parts = [names[name].double() - before[name].double() for name in matrices]
        return torch.cat([each.flatten() for each in parts])

    way = gone(_masters(train(MASTERS)))
    along = {name: gone(weights(train(name))) @ way / (way @ way) for name in (NEAREST, OURS)}
    return {name: each.item() for name, each in along.items()}


def _masters(engine: Any) -> dict[str, torch.Tensor]:
    read = start().utils.safe_get_full_fp32_param
    return {name: read(each).clone() for name, each in engine.module.named_parameters()}
