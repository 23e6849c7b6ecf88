"""What it costs to watch copies of cast models: of memory and time there may be little left."""

import copy

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16.model import blended_weights, watched_weight


@pytest.fixture
def run():
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run = torch_bf16.prepare(model, optimizer, "bf16-stochastic")
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return run


def step(optimizer, steps=16):
    for _ in range(steps):
        optimizer.step()


def follow(target, model, optimizer):
    for _ in range(60):
        optimizer.step()
        with torch.no_grad():
            target.weight.mul_(0.99).add_(model.weight, alpha=0.01)


def test_of_a_growing_pool_of_snapshots_a_few_are_watched(run):
    model, optimizer = run
    pool, watched = [], []
    for _ in range(30):
        step(optimizer)
        watched.append(len(blended_weights._watch.weights))
        pool.append(copy.deepcopy(model))
    assert 0 < watched[5] <= 8
    assert watched[20:] == watched[10:20]


@pytest.mark.parametrize("place", [0, -1])
def test_an_average_beside_a_pool_of_snapshots_is_named(run, place):
    model, optimizer = run
    pool = [copy.deepcopy(model) for _ in range(30)]
    with pytest.warns(UserWarning, match="a copy of 'weight' is bfloat16"):
        follow(pool[place], model, optimizer)


def test_memory_that_runs_out_ends_no_step_and_an_average_is_named_later(run, monkeypatch):
    model, optimizer = run
    average, bits_of = copy.deepcopy(model), watched_weight.bits_of

    def no_memory(weight):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(watched_weight, "bits_of", no_memory)
    before = model.weight.clone()
    step(optimizer)
    assert not torch.equal(model.weight, before)
    monkeypatch.setattr(watched_weight, "bits_of", bits_of)
    with pytest.warns(UserWarning, match="a copy of 'weight' is bfloat16"):
        follow(average, model, optimizer)
