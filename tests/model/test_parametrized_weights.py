"""Weights that torch.nn.utils.parametrize computes, in a model that carries autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import remove_parametrizations

import torch_bf16

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


PARAMETRIZE: dict[str, Any] = {
    "orthogonal": parametrizations.orthogonal,
    "spectral_norm": parametrizations.spectral_norm,
    "symmetric": lambda layer: nn.utils.parametrize.register_parametrization(
        layer, "weight", Symmetric()
    ),
}


def train(model, optimizer):
    for _ in range(5):
        (model(X) - X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("compute", ["autocast", "fp32"])
@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])
@pytest.mark.parametrize("name", PARAMETRIZE)
def test_a_parametrization_is_removed_in_the_middle_of_a_run(name, recipe, compute):
    torch.manual_seed(0)
    model = nn.Sequential(PARAMETRIZE[name](nn.Linear(8, 8)), nn.GELU(), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recipe = torch_bf16.get_recipe(recipe, compute=compute)
    model, optimizer = torch_bf16.prepare(model, optimizer, recipe)
    torch_bf16.carry_autocast(model)
    train(model, optimizer)
    before = model(X)
    remove_parametrizations(model[0], "weight")
    weight = model[0].weight
    assert torch.allclose(model(X), before, atol=0.02)
    assert torch.equal(torch_bf16.fp32_state_dict(model, optimizer)["0.weight"], weight.float())
    written = weight.detach().clone()
    train(model, optimizer)
    assert not torch.equal(weight, written)
    assert weight.isfinite().all()


@pytest.mark.parametrize("compute", ["autocast", "fp32", "bf16"])
def test_a_weight_that_several_were_made_of_is_stored_as_they_were(compute):
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    torch_bf16.cast_model(model, torch_bf16.get_recipe("bf16-stochastic", compute=compute))
    torch_bf16.carry_autocast(model)
    before = model(X)
    remove_parametrizations(model[0], "weight")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.allclose(model(X), before, atol=0.02)


class Outer(nn.Module):
    """A matrix of rank 1 from two vectors, which start from a matrix's singular vectors."""

    def forward(self, x, y):
        return x.unsqueeze(-1) @ y.unsqueeze(-2)

    def right_inverse(self, weight):
        u, s, v = torch.linalg.svd(weight, full_matrices=False)
        return u[:, 0] * s[0].sqrt(), v[0] * s[0].sqrt()


NOT_IN_BF16: list[Any] = [
    pytest.param(
        parametrizations.orthogonal,
        "unsupported operand type.* for @: 'NoneType' and 'Tensor'",
        id="orthogonal",
    ),
    pytest.param(
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", Outer()),
        r"forward\(\) missing 1 required positional argument",
        id="outer",
    ),
]


@pytest.mark.parametrize(("register", "message"), NOT_IN_BF16)
def test_what_starts_from_linear_algebra_is_registered_before_the_cast(register, message):
    torch.manual_seed(0)
    with pytest.raises(TypeError, match=message):
        print(register(torch_bf16.cast_model(nn.Linear(4, 4))).weight)
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    register(layer)
    plain: Any = layer.weight.detach().clone()
    torch_bf16.carry_autocast(torch_bf16.cast_model(layer))
    assert torch.allclose(layer.weight.float(), plain, atol=0.02)


@pytest.mark.parametrize("name", ["orthogonal", "spectral_norm"])
def test_a_weight_is_read_under_autocast_or_of_a_layer_that_carries_it(name):
    torch.manual_seed(0)
    layer = torch_bf16.cast_model(PARAMETRIZE[name](nn.Linear(8, 8)))
    with pytest.raises(RuntimeError, match=r"the same dtype|not implemented for 'BFloat16'"):
        print(layer.weight)
    with torch.autocast("cpu", torch.bfloat16):
        inside: Any = layer.weight
    torch_bf16.carry_autocast(layer)
    outside: Any = layer.weight
    assert torch.allclose(outside.float(), inside.float(), atol=0.02)


class AsComplex(nn.Module):
    def forward(self, weight):
        return torch.complex(weight.float(), weight.float().flip(-1))


def test_a_complex_weight_stays_complex_where_it_is_read():
    layer = torch_bf16.cast_model(nn.Linear(4, 4))
    nn.utils.parametrize.register_parametrization(layer, "weight", AsComplex(), unsafe=True)
    plain: Any = layer.weight
    torch_bf16.carry_autocast(layer)
    assert torch.equal(layer.weight, plain)
