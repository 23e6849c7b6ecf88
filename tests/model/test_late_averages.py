"""Averages in bf16 that begin late, move seldom, or go on after an interrupt are named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16.model.watched_weight import WatchedWeight

X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))


def prepared(*networks):
    """Optimizers of the networks, and for each network an average that no optimizer trains."""
    torch.manual_seed(0)
    model = nn.ModuleDict()
    for number, network in enumerate(networks):
        model[f"online{number}"] = network
        model[f"average{number}"] = average = nn.Linear(32, 32).requires_grad_(False)
        average.load_state_dict(network.state_dict())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in networks]
    torch_bf16.prepare(model, optimizers, "bf16-stochastic")
    return model, optimizers


def turn(network, optimizer):
    with torch.autocast("cpu", torch.bfloat16):
        loss = network(X).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def pass_by(optimizers, steps):
    """Steps without gradients count, and take no time."""
    for _ in range(steps):
        for each in optimizers:
            each.step()


@torch.no_grad()
def move(model):
    for mine, weight in zip(
        model["average0"].parameters(), model["online0"].parameters(), strict=True
    ):
        mine.data = mine.data * 0.998 + weight.data * 0.002


def train(model, optimizers, turns, begins=0, every=1):
    for number in range(turns):
        for each, optimizer in enumerate(optimizers):
            turn(model[f"online{each}"], optimizer)
        if number >= begins and number % every == 0:
            move(model)


@pytest.mark.parametrize("begins", [990, 9_990])
def test_an_average_that_begins_late_is_named(begins):
    model, optimizers = prepared(nn.Linear(32, 32))
    pass_by(optimizers, begins)
    with pytest.warns(UserWarning, match=r"'average0.weight'"):
        train(model, optimizers, 60)


@pytest.mark.parametrize("begins", [990, 9_990])
def test_an_average_is_named_that_moves_after_every_tenth_turn_of_two_optimizers(begins):
    """As in stylegan2-pytorch and lightweight-gan, from their 20,000th turn on."""
    model, optimizers = prepared(nn.Linear(32, 32), nn.Linear(32, 32))
    pass_by(optimizers, begins // 2 - 50)
    with pytest.warns(UserWarning, match=r"'average0.weight'"):
        train(model, optimizers, 120, begins=50, every=10)


def test_an_average_is_named_in_a_program_that_goes_on_after_an_interrupt(monkeypatch):
    """Which comes where the device is waited for, as in a notebook."""
    model, optimizers = prepared(nn.Linear(32, 32))
    with monkeypatch.context() as patch:
        patch.setattr(WatchedWeight, "is_written", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizers, 32)
    with pytest.warns(UserWarning, match=r"'average0.weight' is bfloat16"):
        train(model, optimizers, 40)


def interrupt(*_):
    raise KeyboardInterrupt
