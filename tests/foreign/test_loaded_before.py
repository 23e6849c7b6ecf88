"""A checkpoint that was loaded before ``prepare``, as many scripts do."""

import copy

import pytest
import torch

import torch_bf16
from torch_bf16 import Recipe, StateMismatchError

RECIPES = [
    torch_bf16.get_recipe("bf16-fp32-master", compute="fp32"),
    torch_bf16.get_recipe("bf16-stochastic", compute="fp32"),
    Recipe("24 bits", weights="bf16+8", compute="fp32"),
    Recipe("both", weights="bf16+fp32", exp_avg="fp32", exp_avg_sq="fp32", compute="fp32"),
]


def make(kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16))
    return model, kind(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(x).square().mul(torch.arange(16.0)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(params=RECIPES, ids=lambda each: each.name)
def recipe(request):
    return request.param


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adamax])
@pytest.mark.parametrize("convert_first", [False, True])
def test_the_run_goes_on_with_the_bits_of_an_uninterrupted_one(recipe, kind, convert_first):
    """torch casts remainders as it loads them, and the optimizer took them to be damaged."""
    model, optimizer = torch_bf16.prepare(*make(kind), recipe)
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 3)

    again, optimizer_again = make(kind)
    again.load_state_dict(saved[0])
    optimizer_again.load_state_dict(saved[1])
    if convert_first:  # as Accelerate does
        torch_bf16.convert(optimizer_again, recipe, model=again)
        torch_bf16.cast_model(again, recipe)
    else:
        torch_bf16.prepare(again, optimizer_again, recipe)
    train(again, optimizer_again, 3)

    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    exact = torch_bf16.fp32_state_dict(model, optimizer)
    found = torch_bf16.fp32_state_dict(again, optimizer_again)
    assert all(torch.equal(exact[name], found[name]) for name in exact)


def test_remainders_of_weights_that_were_rounded_since_are_refused():
    model, optimizer = torch_bf16.prepare(*make(torch.optim.AdamW), RECIPES[0])
    train(model, optimizer, 3)
    again, optimizer_again = make(torch.optim.AdamW)
    optimizer_again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.bfloat16()
    with pytest.raises(StateMismatchError, match="Convert the optimizer first, and load"):
        torch_bf16.convert(optimizer_again, RECIPES[0], model=again)


def test_remainders_of_weights_that_have_moved_since_are_refused():
    recipe = RECIPES[0]
    model, optimizer = torch_bf16.prepare(*make(torch.optim.AdamW), recipe)
    train(model, optimizer, 3)
    again, optimizer_again = make(torch.optim.AdamW)
    again.load_state_dict(model.state_dict())
    optimizer_again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(again, optimizer_again, 1)
    with pytest.raises(StateMismatchError, match="Convert the optimizer first, and load"):
        torch_bf16.prepare(again, optimizer_again, recipe)
