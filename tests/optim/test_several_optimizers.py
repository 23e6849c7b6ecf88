"""What reads exact weights is given every optimizer that trains them, or says what it lacks."""

import copy

import pytest
import torch
from torch import nn

import torch_bf16


@pytest.fixture
def gan():
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(8, 8), "d": nn.Linear(8, 8)})
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-5) for each in model.values()]
    torch_bf16.prepare(model, optimizers, "bf16-fp32-master")
    for each in model.parameters():
        each.grad = torch.randn_like(each)
    for each in optimizers:
        each.step()
    return model, optimizers


def exact_weights(model, *optimizers):
    with torch_bf16.exact_weights(model, *optimizers) as weights:
        return {name: each.clone() for name, each in weights.items()}


def averaged(model, *optimizers):
    ema = torch_bf16.EMA(copy.deepcopy(model))
    ema.update_parameters(model, *optimizers)
    return dict(ema.module.named_parameters())


@pytest.mark.parametrize("read", [exact_weights, torch_bf16.fp32_state_dict, averaged])
def test_weights_whose_masters_are_elsewhere_are_named(gan, read):
    model, (of_g, of_d) = gan
    whole = read(model, of_g, of_d)
    assert not torch.equal(whole["d.weight"], model["d"].weight.float())
    with pytest.warns(UserWarning, match=r"given AdamW, and 2 weights of the .* first 'd.weight'"):
        part = read(model, of_g)
    assert torch.equal(part["g.weight"], whole["g.weight"])
    assert torch.equal(part["d.weight"], model["d"].weight.float())


def test_they_are_named_as_soon_as_their_states_are_loaded(gan):
    model, (of_g, of_d) = gan
    for each in (of_g, of_d):
        each.load_state_dict(each.state_dict())
    torch_bf16.fp32_state_dict(model, of_g, of_d)
    with pytest.warns(UserWarning, match="the first 'd.weight'"):
        torch_bf16.fp32_state_dict(model, of_g)


@pytest.mark.parametrize("read", [exact_weights, torch_bf16.fp32_state_dict])
def test_what_needs_no_other_optimizer_is_not_named(gan, read):
    model, (of_g, of_d) = gan
    read(model)
    read(model["g"], of_g, of_d)
    with torch.no_grad():
        model["d"].weight.mul_(2)
        model["d"].bias.mul_(2)
    read(model, of_g)


@pytest.mark.parametrize("read", [exact_weights, torch_bf16.fp32_state_dict, averaged])
def test_a_list_of_optimizers_is_refused_with_what_works(gan, read):
    model, optimizers = gan
    with pytest.raises(ValueError, match=r"given a list of 2; pass each .*such as \*optimizers"):
        read(model, optimizers)
