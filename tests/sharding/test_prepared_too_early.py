"""A model whose parameters were replaced after prepare() had seen them, as fully_shard does:
before the first step, between two, and where gradients are released."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_bf16
from torch_bf16 import StateMismatchError, plugin_api

REFUSED = (
    r"no parameter of this \w+ has a gradient, .*were replaced, as fully_shard, to_empty and.*"
    r"then call prepare\(\) or convert\(\)\. Nothing was updated"
)


def shard_after_prepare():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch_bf16.prepare(model, optimizer)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model(torch.ones(2, 4).bfloat16()).sum().backward()
    with pytest.raises(StateMismatchError, match=REFUSED):
        optimizer.step()
    ours = torch_bf16.AdamW(model.parameters(), lr=0.1)
    before = [p.full_tensor().clone() for p in model.parameters()]
    ours.step()
    assert not any(map(torch.equal, (p.full_tensor() for p in model.parameters()), before))


def test_fully_shard_after_prepare_is_refused_by_the_step(ranks):
    ranks(1, shard_after_prepare)


def prepare_again_where_weights_are_gathered():
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch_bf16.prepare(model, optimizer)
    with torch.no_grad():
        model(torch.ones(2, 4).bfloat16())
    shown = {id(p) for p in model.parameters()}
    assert shown.isdisjoint(id(p) for g in optimizer.param_groups for p in g["params"])
    plugin_api.refuse_replaced([optimizer])


def test_what_a_forward_pass_has_gathered_replaces_nothing(ranks):
    ranks(1, prepare_again_where_weights_are_gathered)


def shard_after_a_step(release):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch_bf16.prepare(model, optimizer)
    if release:
        torch_bf16.release_gradients(model, optimizer)

    def backward():
        optimizer.zero_grad()
        model(torch.ones(2, 4).bfloat16()).sum().backward()

    for _ in range(2):
        backward()
        optimizer.step()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    backward()
    with pytest.raises(StateMismatchError, match=REFUSED):
        optimizer.step()


@pytest.mark.parametrize("release", [False, True], ids=["ordinary", "released"])
def test_fully_shard_after_a_step_is_refused_by_the_next(ranks, release):
    ranks(1, shard_after_a_step, release)


def test_released_gradients_of_parameters_that_replaced_others_are_refused_by_the_first_step():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch_bf16.prepare(model, optimizer)
    torch_bf16.release_gradients(model, optimizer)
    old = model.weight, model.bias
    model.weight, model.bias = (nn.Parameter(p.detach().clone()) for p in old)
    model(torch.ones(2, 4).bfloat16()).sum().backward()
    with pytest.raises(StateMismatchError, match=REFUSED):
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Rprop, torch_bf16.AdamW])
def test_a_step_that_would_train_nothing_is_refused(kind):
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    torch_bf16.prepare(model, optimizer)
    old = model.weight, model.bias
    model.weight, model.bias = (nn.Parameter(p.detach().clone()) for p in old)
    model(torch.ones(2, 4).bfloat16()).sum().backward()
    # A copy steps for parameters of its own.
    copy.deepcopy(optimizer).step()
    with pytest.raises(StateMismatchError, match=REFUSED):
        optimizer.step()
    model.weight, model.bias = old
    model.bias.grad = torch.ones_like(model.bias)
    optimizer.step()
    assert len(optimizer.state) == 1
    # As well where the last step trained them.
    optimizer.zero_grad()
    model.weight, model.bias = (nn.Parameter(p.detach().clone()) for p in old)
    model(torch.ones(2, 4).bfloat16()).sum().backward()
    with pytest.raises(StateMismatchError, match=REFUSED):
        optimizer.step()


def test_a_step_without_any_gradient_is_none():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch_bf16.prepare(model, optimizer)
    optimizer.step()
    model.weight.requires_grad_(False)
    optimizer.step()
    assert not optimizer.state


def test_weights_that_are_assigned_after_prepare_are_refused_by_the_step():
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch_bf16.prepare(model, optimizer)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    model(torch.ones(2, 4).bfloat16()).sum().backward()
    with pytest.raises(StateMismatchError, match=REFUSED):
        optimizer.step()
