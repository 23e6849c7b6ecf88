"""Weights that DDP sends to all ranks during a run: when it wraps again, and when join() ends."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_bf16
from torch_bf16 import errors

RECIPES = ["bf16-stochastic", "bf16-fp32-master"]


def made(recipe, seed=0, kind=torch.optim.AdamW):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    optimizer = kind(model.parameters(), lr=1e-2)
    return torch_bf16.prepare(model, optimizer, recipe)


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(100 * step + dist.get_rank())
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(8, 16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def bits(model, optimizer):
    states = [optimizer.state[p] for p in model.parameters()]
    numbers = [value for state in states for _, value in sorted(state.items())]
    tensors = [*model.parameters(), *filter(torch.is_tensor, numbers)]
    return [each.detach().reshape(-1).view(torch.uint8).tolist() for each in tensors]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_that_is_wrapped_again_keeps_its_masters(one_rank, recipe):
    runs = []
    for again in (False, True):
        model, optimizer = made(recipe)
        wrapped = DistributedDataParallel(model)
        torch_bf16.sync_masters(wrapped)
        for begin in (0, 3, 6):
            train(wrapped, optimizer, range(begin, begin + 3))
            if again:
                wrapped = DistributedDataParallel(model)
        runs.append(bits(model, optimizer))
    assert runs[0] == runs[1]


def replaced(recipe):
    """Rank 1 is replaced during the run; the others give it what they have, and wrap again."""
    model, optimizer = made(recipe)
    wrapped = DistributedDataParallel(model)
    torch_bf16.sync_masters(wrapped)
    train(wrapped, optimizer, range(3))
    saved = [(model.state_dict(), optimizer.state_dict())]
    dist.broadcast_object_list(saved, src=0)
    if dist.get_rank() == 1:
        model, optimizer = made(recipe, seed=1)
        model.load_state_dict(saved[0][0])
        optimizer.load_state_dict(saved[0][1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = DistributedDataParallel(model)
    train(wrapped, optimizer, range(3, 6))
    return bits(model, optimizer)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_rank_that_joins_a_run_goes_on_with_the_bits_of_the_others(ranks, recipe):
    first, second = ranks(2, replaced, recipe)
    assert first == second


def joined(recipe):
    """Rank 0 has fewer batches; afterwards all take the states of rank 1."""
    model, optimizer = made(recipe, kind=torch.optim.SGD)
    wrapped = DistributedDataParallel(model)
    torch_bf16.sync_masters(wrapped)
    errors._said.clear()
    said = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with wrapped.join():
                train(wrapped, optimizer, range(2 + 2 * dist.get_rank()))
        said += [str(each.message) for each in caught if "has given this rank" in str(each.message)]
        states = [optimizer.state_dict()]
        dist.broadcast_object_list(states, src=1)
        optimizer.load_state_dict(states[0])
        train(wrapped, optimizer, range(2))
    return said, bits(model, optimizer)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_rank_whose_inputs_ended_early_is_told_how_to_go_on(ranks, recipe):
    (early, first), (late, second) = ranks(2, joined, recipe)
    assert len(early) == 1
    assert "src=1" in early[0]
    assert late == []
    assert first == second
