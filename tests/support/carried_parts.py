"""A small network whose parts are called on their own, or computed again in the backward pass."""

from __future__ import annotations

import torch
from torch import nn

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(5))


class BodyAndHead(nn.Module):
    """Two parts with the same weights each time; subclasses say how they are called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU())
        self.head = nn.Linear(16, 4)
