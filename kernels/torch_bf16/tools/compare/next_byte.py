"""The built-in model: the next byte from the eight before it.

Its losses change smoothly with weights and batches, so that a few pairs of runs resolve small
differences. A small transformer at first learns only the frequencies of bytes, and when it gets
beyond them is chance: its paired runs end as far apart as runs with different seeds.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CONTEXT", "NextByte"]

CONTEXT = 8
_BYTES, _EMBEDDED, _WIDTH, _BLOCKS = 256, 64, 256, 2


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class NextByte(nn.Module):
    """Embeddings side by side, residual layers and an output layer (after Bengio et al., 2003).

    ``forward`` takes bytes, int64 of shape (batch, CONTEXT + 1), and returns the mean cross entropy
    of the last ones, in nats.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_BYTES, _EMBEDDED)
        self.first = nn.Linear(CONTEXT * _EMBEDDED, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(_BLOCKS))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _BYTES)

    def forward(self, batch: Tensor) -> Tensor:
        x = F.gelu(self.first(self.embedding(batch[:, :-1]).flatten(1)))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float(), batch[:, -1])
