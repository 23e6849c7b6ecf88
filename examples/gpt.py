"""A small GPT over bytes, in plain PyTorch. Nothing in it knows about precision."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class GPTConfig:
    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.attention_out = nn.Linear(config.width, config.width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width, bias=False)
        self.contract = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.contract(F.gelu(self.expand(self.feed_forward_norm(x))))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    """Maps bytes to logits of the next byte. The output layer shares the embedding's weight."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.embedding = nn.Embedding(config.vocabulary, width)
        self.positions = nn.Embedding(config.context, width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.vocabulary, bias=False)
        self.apply(self._initialise)
        for block in self.blocks:
            # Each block adds twice to the residual stream: keep its variance independent of depth.
            for layer in (block.attention_out, block.contract):
                nn.init.normal_(layer.weight, std=0.02 * (2 * config.layers) ** -0.5)
        self.head.weight = self.embedding.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


def next_byte_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy in nats, in fp32 whatever the model computes in."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def add_size_arguments(parser: argparse.ArgumentParser, batch_size: int = 16) -> None:
    """Declare the options for the sizes of model, batches and text, and the learning rate."""
    parser.add_argument("--batch-size", type=int, default=batch_size)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--corpus-bytes", type=int, default=4_000_000)
