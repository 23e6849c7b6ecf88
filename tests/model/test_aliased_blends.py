"""A target network in bf16 is named beside weights that only look as if they were blended."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_bf16

STEPS = 40


def share(player, model):
    """As sheeprl and other RL programs let a player act with the weights that are trained."""
    for mine, weight in zip(player.parameters(), model.parameters(), strict=True):
        mine.data = weight.data


def copy_in(player, model):
    player.load_state_dict(model.state_dict())


def train(model, optimizer, player, target, follow):
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        model(torch.randn(8, 32, generator=generator).bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        follow(player, model)
        for mine, weight in zip(target.parameters(), model.parameters(), strict=True):
            mine.data.mul_(0.99).add_(weight.data, alpha=0.01)


@pytest.mark.parametrize("follow", [share, copy_in])
def test_a_target_is_named_beside_a_player_that_has_all_numbers_of_the_trained_weights(follow):
    """The player's weights, more than are compared at a time, come first: it was cast first."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch_bf16.prepare(model, optimizer, "bf16-stochastic")
    player, target = (torch_bf16.cast_model(copy.deepcopy(model)) for _ in range(2))
    with pytest.warns(UserWarning, match="of which no optimizer of torch_bf16 trains") as caught:
        train(model, optimizer, player, target, follow)
    assert len(caught) == 1
