"""Optimizers without a fused rule: what they read of a tensor, and runs of them."""

from __future__ import annotations

import random

import torch
from foreign_cases import OWN, Normed, unknown
from sharded_training import Run

import torch_bf16

STEPS = 6


class Trust(torch.optim.Optimizer):
    """Momentum at a rate that follows from the norms of the whole weight and of its update."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    average = state.setdefault("exp_avg", torch.zeros_like(p))
                    average.lerp_(p.grad, 0.1)
                    ratio = p.norm() / average.norm().clamp(min=1e-6)
                    p.add_(average * ratio.clamp(max=10), alpha=-group["lr"])


class Rows(torch.optim.Optimizer):
    """A second moment for each row, a shape of its own."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    rows = p.grad.view(len(p), -1).square().mean(1)
                    mean = state.setdefault("rows", torch.zeros_like(rows)).lerp_(rows, 0.1)
                    shape = (-1,) + (1,) * (p.ndim - 1)
                    p.sub_(group["lr"] * p.grad / (mean.sqrt() + 1e-8).view(shape))


class Draws(torch.optim.SGD):
    """Descent with noise."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


class Tosses(torch.optim.SGD):
    """Descent at times."""

    def step(self, closure=None):
        if random.random() < 0.9:
            super().step()


def converted(kind, elementwise):
    """For a ``Run``: what makes the optimizer of a model and a recipe."""

    def make(model, recipe):
        optimizer = kind(model.parameters())
        torch_bf16.convert(optimizer, recipe, model=model, elementwise=elementwise)
        optimizer.bucket_bytes = 5000
        return optimizer

    return make


# What needs whole matrices, and what is refused for its random numbers.
WHOLE = {"trust", "rows", "normed", "draws", "tosses"}
KINDS = {
    name: converted(kind, name not in WHOLE)
    for name, kind in {
        "rprop": OWN["rprop"],
        "amsgrad": unknown(torch.optim.AdamW, lr=0.01, amsgrad=True),
        "adamax": OWN["adamax"],
        "trust": Trust,
        "rows": Rows,
        "normed": Normed,
        "draws": lambda parameters: Draws(parameters, lr=0.1),
        "tosses": lambda parameters: Tosses(parameters, lr=0.1),
    }.items()
}


def foreign_run(case, kind, recipe):
    return Run(case, recipe, KINDS[kind], backend=None)
