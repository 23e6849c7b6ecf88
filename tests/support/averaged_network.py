"""A network to average, which has weights and buffers."""

import torch
from torch import nn


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4))


def move(model: nn.Module) -> None:
    """What a step and a forward pass would change, in place."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
        for b in model.buffers():
            b.add_(1)
