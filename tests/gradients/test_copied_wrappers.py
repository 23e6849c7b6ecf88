"""Copies of DDP modules, as averages make them, whose gradients are reduced or released here."""

import copy
import pickle

import pytest
import torch
from ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import torch_bf16


def setup(model, optimizer, released):
    torch_bf16.setup_gradients(model, optimizer)
    if released:
        torch_bf16.release_gradients(model, optimizer)


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, 64)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def run(released, options):
    recipe = torch_bf16.get_recipe("bf16-stochastic", **options)
    torch.manual_seed(0)
    module = torch_bf16.cast_model(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), recipe)
    optimizer = torch_bf16.AdamW(module.named_parameters(), recipe=recipe)
    model = DistributedDataParallel(module)
    setup(model, optimizer, released)
    train(model, optimizer, range(2))
    AveragedModel(model).update_parameters(model)
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    train(model, optimizer, range(2, 4))
    for twin, its_optimizer in copies:
        setup(twin, its_optimizer, released)
        train(twin, its_optimizer, range(2, 4))
        assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize(
    ("released", "options"),
    [
        (True, {}),
        (False, {"accumulate": "fp32"}),
        (False, {"accumulate": "bf16_stochastic"}),
        (False, {"reduce": "bf16_wire"}),
    ],
    ids=["released", "fp32", "stochastic", "wire"],
)
def test_a_copy_trains_like_the_original_once_it_is_set_up(ranks: Ranks, released, options):
    ranks(1, run, released, options)
