"""Models whose memory is estimated and measured, the bytes that they hold, and the command."""

from __future__ import annotations

import json

import torch
from sharded_models import local
from torch import nn

from torch_bf16.tools import cli
from torch_bf16.tools.estimate.precisions import precisions

ROWS = {each.name + ", released" * each.released: each for each in precisions()}


def estimate(capsys, *arguments):
    """The exit status, the record from standard output, and what was said beside it."""
    status = cli.main(["estimate", *map(str, arguments), "--json", "-"])
    out, err = capsys.readouterr()
    return status, json.loads(out) if status == 0 else None, err


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width=96, layers=3, words=301):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def nbytes(tensors):
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in map(local, tensors)}
    return sum(each.nbytes() for each in storages.values())


def allocated(model, optimizer):
    """Bytes by role, of the tensors themselves."""
    masters = ("remainder16", "remainder8", "master")
    states = [s for each in optimizer.state.values() for s in each.items() if s[0] != "step"]
    return {
        "weights": nbytes(model.parameters()),
        "buffers": nbytes(model.buffers()),
        "gradients": nbytes(p.grad for p in model.parameters() if p.grad is not None),
        "moments": nbytes(t for name, t in states if name not in masters),
        "master": nbytes(t for name, t in states if name in masters),
    }
