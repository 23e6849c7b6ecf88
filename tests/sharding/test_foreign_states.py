"""States and gradients from elsewhere: other wrappers, orders, meshes and worlds."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from optimizer_cases import bits
from sharded_models import local
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_bf16
from torch_bf16 import StateMismatchError
from torch_bf16.checkpoints.export import fp32_weights
from torch_bf16.checkpoints.reader import OptimizerStates
from torch_bf16.errors import CheckpointError

RECIPES = ("bf16-stochastic", "bf16-fp32-master")


def network(recipe, mesh=None):
    torch.manual_seed(0)
    model = torch_bf16.cast_model(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), recipe)
    if mesh is not None:
        for layer in model:
            for name, p in [*layer.named_parameters(recurse=False)]:
                setattr(layer, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
    return model


def train(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
            sharded = isinstance(p, DTensor)
            p.grad = distribute_tensor(gradient, p.device_mesh, [Shard(0)]) if sharded else gradient
        optimizer.step()
    return [bits(local(p)) for p in model.parameters()]


def adamw(model, recipe, prefix=""):
    named = [(prefix + name, p) for name, p in model.named_parameters()]
    return torch_bf16.AdamW(named, lr=0.01, recipe=recipe)


def adamax(model, recipe):
    return torch_bf16.convert(torch.optim.Adamax(model.parameters()), recipe, model=model)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_of_wrapped_modules_key_the_same_noise(prefix):
    found = []
    for each in ("", prefix):
        model = network("bf16-stochastic")
        found.append(train(model, adamw(model, "bf16-stochastic", each), range(3)))
    assert all(map(torch.equal, *found))
    other = network("bf16-stochastic")
    other = train(other, adamw(other, "bf16-stochastic", "other."), range(3))
    assert not all(map(torch.equal, other, found[0]))


@pytest.mark.parametrize("make", [adamw, adamax], ids=["fused", "own step"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_states_of_a_sharded_run_go_on_whole_in_a_plain_one(one_rank, recipe, make):
    sharded, plain, through = network(recipe, one_rank), network(recipe), network(recipe)
    optimizers = [make(each, recipe) for each in (sharded, plain, through)]
    ends = [train(m, o, range(2)) for m, o in zip((sharded, plain), optimizers, strict=False)]
    assert all(map(torch.equal, *ends))
    weights = {name: each.full_tensor() for name, each in sharded.state_dict().items()}
    through.load_state_dict(weights)
    optimizers[2].load_state_dict(optimizers[0].state_dict())
    kept = [v for state in optimizers[2].state.values() for v in state.values()]
    assert not any(isinstance(each, DTensor) for each in kept)
    ends = [train(m, o, range(2, 4)) for m, o in zip((plain, through), optimizers[1:], strict=True)]
    assert all(map(torch.equal, *ends))


# torch's own makes the states to load.
@pytest.mark.filterwarnings("ignore:.*was not converted")
@pytest.mark.parametrize("ours", [False, True], ids=["torch", "ours"])
def test_a_number_in_a_saved_state_is_not_taken_for_a_sharded_tensor(one_rank, ours):
    """NAdam's ``mu_product``, which every state dict of it has."""
    one, other = (network(RECIPES[1], one_rank) for _ in range(2))
    kind = functools.partial(torch_bf16.NAdam, recipe=RECIPES[1]) if ours else torch.optim.NAdam
    saved = kind(one.named_parameters(), lr=0.01)
    train(one, saved, range(2))
    loaded = torch_bf16.NAdam(other.named_parameters(), lr=0.01, recipe=RECIPES[1])
    loaded.load_state_dict(saved.state_dict())
    for p, its in zip(one.parameters(), other.parameters(), strict=True):
        exp_avg = saved.state[p]["exp_avg"].full_tensor().float()
        assert torch.equal(loaded.state[its]["exp_avg"].full_tensor(), exp_avg)
        assert loaded.state[its]["step"] == 2


@pytest.mark.parametrize("make", [adamw, adamax], ids=["fused", "own step"])
def test_a_gradient_on_another_mesh_is_refused(one_rank, make):
    model = network("bf16-stochastic", one_rank)
    optimizer = make(model, "bf16-stochastic")
    before = [p.full_tensor().clone() for p in model.parameters()]
    other = init_device_mesh("cpu", (1, 1), mesh_dim_names=("rows", "columns"))
    for p in model.parameters():
        p.grad = distribute_tensor(torch.ones_like(p.full_tensor()), other, [Shard(0), Replicate()])
    with pytest.raises(
        ValueError, match=r"'0.weight' .* its gradient on DeviceMesh\(.*Nothing was"
    ):
        optimizer.step()
    assert all(
        torch.equal(p.full_tensor(), w) for p, w in zip(model.parameters(), before, strict=True)
    )
    assert not optimizer.state


@pytest.mark.parametrize("wrapped", ["", "module."])
def test_states_in_another_order_are_refused_where_names_tell(wrapped):
    model = network(RECIPES[1])
    optimizer = adamw(model, RECIPES[1])
    train(model, optimizer, range(2))
    named = [(wrapped + name, p) for name, p in model.named_parameters()]
    named[0], named[2] = named[2], named[0]
    other = torch_bf16.AdamW(named, recipe=RECIPES[1])
    with pytest.raises(
        StateMismatchError, match=r"number 0 is '0.weight' there and '1.weight' here"
    ):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state


def test_moments_without_their_step_are_refused():
    model = network(RECIPES[1])
    optimizer = adamw(model, RECIPES[1])
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][1]["step"]
    other = adamw(model, RECIPES[1])
    with pytest.raises(StateMismatchError, match=r"'0.bias' .* and no step, which corrects their"):
        other.load_state_dict(saved)
    assert not other.state


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_masters_are_exported_whatever_wrapped_the_model(prefix):
    model = network(RECIPES[1])
    optimizer = adamax(model, RECIPES[1])
    train(model, optimizer, range(2))
    weights = {prefix + name: each for name, each in model.state_dict().items()}
    states = [OptimizerStates.of(optimizer.state_dict())]
    found, exact = fp32_weights(weights, states)
    assert exact == len(weights) == 4
    expected = torch_bf16.fp32_state_dict(model, optimizer)
    assert all(torch.equal(found[prefix + name], each) for name, each in expected.items())
    foreign = {f"{name}_of_another": each for name, each in weights.items()}
    with pytest.raises(CheckpointError, match=r"exact masters of 0.weight, .* belong to no weight"):
        fp32_weights(foreign, states)
