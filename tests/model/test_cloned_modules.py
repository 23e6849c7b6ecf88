"""Modules that a library of meta-learning clones by copying what is in an instance."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16 import plugin_api

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(5))


def clone_of(module: Any) -> Any:
    """As ``learn2learn.clone_module``: an instance with the same entries, and weights computed."""
    clone = module.__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    clone._parameters = {k: p if p is None else p.clone() for k, p in module._parameters.items()}
    clone._modules = {name: clone_of(each) for name, each in module._modules.items()}
    return clone


def weights_of(module: nn.Module) -> list[torch.Tensor]:
    """Parameters that are computed are no ``nn.Parameter``, and have no place in an optimizer."""
    return [p for each in module.modules() for p in each._parameters.values() if p is not None]


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.GELU()), nn.Linear(16, 4))
    return torch_bf16.cast_model(net, torch_bf16.get_recipe("bf16-fp32-master", **options))


@pytest.mark.parametrize("around", [contextlib.nullcontext, plugin_api.inside_step])
@pytest.mark.parametrize("keep_fp32", [(), ("1",)])
@pytest.mark.parametrize("compute", ["autocast", "fp32", "bf16"])
@pytest.mark.parametrize("part", [None, 0])
def test_a_clone_computes_with_its_own_weights_and_differentiates_them(
    compute, keep_fp32, part, around
):
    net = make(compute=compute, keep_fp32=keep_fp32)
    torch_bf16.carry_autocast(net)
    original = net if part is None else net[part]
    x = X.bfloat16() if compute == "bf16" else X
    within = torch.autocast("cpu", torch.bfloat16, enabled=around is not contextlib.nullcontext)
    with around(), within:
        clone = clone_of(original)
        assert torch.equal(clone(x), original(x))
        expected = [each.detach().clone() for each in weights_of(clone)]
        before = clone(x)
        gradients = torch.autograd.grad(before.sum(), weights_of(clone))
        assert all(each.count_nonzero() for each in gradients)
        with torch.no_grad():
            for each in weights_of(clone):
                each.zero_()
        assert not clone(x).count_nonzero()
        assert original(x).count_nonzero()
    assert all(map(torch.equal, weights_of(original), expected))


def test_a_clone_of_a_part_in_fp32_computes_with_its_own_weights():
    net = make(keep_fp32=("1",))
    clone = clone_of(net)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        clone[1]._parameters["weight"].zero_()
        clone[1]._parameters["bias"].fill_(2.0)
        assert clone(X).eq(2).all()
        assert not net(X).eq(2).all()


def test_a_copy_outlives_the_module_that_it_was_made_from():
    net = torch_bf16.carry_autocast(make())
    expected = net(X)
    net = copy.copy(net)
    assert torch.equal(net(X), expected)
    assert net.forward.__self__ is net


def test_a_clone_of_a_clone_takes_its_steps_on_its_own_weights():
    net = torch_bf16.carry_autocast(make())
    losses, clones = [], [net]
    for _ in range(3):
        clones.append(clone_of(clones[-1]))
        loss = clones[-1](X).square().mean()
        weights = weights_of(clones[-1])
        with torch.no_grad():
            for each, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                each.sub_(0.5 * gradient)
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]


def test_a_part_in_fp32_is_still_compiled_without_a_break():
    net = make(keep_fp32=("1",))
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(X), net(X))


def test_a_clone_of_a_copy_in_fp32_computes_with_its_own_weights():
    net = torch_bf16.carry_autocast(make()).float()
    clone = clone_of(copy.deepcopy(net))
    assert torch.equal(clone(X), net(X))
    with torch.no_grad():
        for each in weights_of(clone):
            each.zero_()
    assert not clone(X).count_nonzero()


class Adapts(nn.Module):
    """Clones its layers within its own forward, as a hypernetwork or an inner loop does."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        clone = clone_of(self.net)
        with torch.no_grad():
            for each in weights_of(clone):
                each.zero_()
        return self.net(x), clone(x)


@pytest.mark.parametrize("compute", ["autocast", "fp32", "bf16"])
def test_a_clone_inside_a_carried_forward_computes_with_its_own_weights(compute):
    torch.manual_seed(0)
    recipe = torch_bf16.get_recipe("bf16-fp32-master", compute=compute)
    net = Adapts(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    torch_bf16.carry_autocast(torch_bf16.cast_model(net, recipe), compute=compute)
    original, clone = net(X)
    assert original.count_nonzero()
    assert not clone.count_nonzero()
