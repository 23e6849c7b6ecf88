"""A small network whose states are on the device or in host memory, and what both must leave."""

from __future__ import annotations

import torch
from optimizer_cases import RECIPES
from torch import nn

import torch_bf16
from torch_bf16 import Recipe

BYTES = Recipe("bytes", weights="bf16+8", exp_avg="int8", exp_avg_sq="int8")


def offloaded(recipe):
    return torch_bf16.get_recipe(RECIPES.get(recipe, recipe), offload="states")


def network(recipe=BYTES, backend="eager"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return torch_bf16.prepare(model, optimizer, recipe, backend=backend)


def backward(model, seed):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    model(x).float().square().mean().backward()


def contents(model, optimizer):
    states = [each for p in model.parameters() for each in optimizer.state[p].values()]
    every = (*model.parameters(), *states)
    return [each.detach().cpu().clone().contiguous().view(-1) for each in every]


def same(one, other):
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def both(train, recipe=BYTES, **options):
    """What some training leaves, with states on the device and on the host."""
    found = []
    for each in (recipe, offloaded(recipe)):
        model, optimizer = network(each, **options)
        train(model, optimizer)
        found.append(contents(model, optimizer))
    assert same(*found)


def plain_steps(model, optimizer, steps=range(3)):
    for seed in steps:
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()
