"""A model with all that a cast must respect, and something else to save beside it.

Not in conftest.py: torch.compile looks a class up by the name of its module, which several share.
"""

from __future__ import annotations

import torch
from torch import nn


class Model(nn.Module):
    """A norm on raw fp32 inputs, a buffer, tied weights, batch norm."""

    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.middle = nn.Linear(width, width)
        self.also_middle = nn.Linear(width, width)
        self.also_middle.weight = self.middle.weight
        self.down = nn.Linear(width, 1)
        self.register_buffer("scale", torch.tensor(1.0009765625))

    def forward(self, x):
        x = self.batch_norm(self.up(self.norm(x) * self.scale))
        return self.down(self.also_middle(torch.relu(self.middle(torch.relu(x)))))


class Counter:
    """Something of the user's, for ``register_for_checkpointing``."""

    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
