"""Averages in bf16 that a program replaces by new tensors, instead of writing them in place."""

import pytest
import torch
from torch import nn

import torch_bf16

BOTH = ["bf16-stochastic", "bf16-fp32-master"]


def new_tensor(average, key, weight):
    average[key] = 0.995 * average[key] + 0.005 * weight


def clone(average, key, weight):
    average[key] = (0.005 * weight + 0.995 * average[key]).clone()


def copy(average, key, weight):
    average[key] = weight.clone()


def other_numbers(average, key, weight):
    average[key] = torch.randn_like(weight)


def train(recipe, kind, blend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch_bf16.prepare(model, optimizer, recipe)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    average = {name: weight.clone() for name, weight in weights.items()}
    if kind is list:
        average = [*average.values()]
    for _ in range(80):
        x = torch.randn(16, 64).bfloat16()
        (model(x) - x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for key, weight in enumerate(weights.values()) if kind is list else weights.items():
            blend(average, key, weight)


@pytest.mark.parametrize("recipe", BOTH)
@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("blend", [new_tensor, clone])
def test_an_average_of_new_tensors_is_named_once(recipe, kind, blend):
    match = "a tensor outside of all modules follows '[01].weight'.*average before the model is"
    with pytest.warns(UserWarning, match=match) as caught:
        train(recipe, kind, blend)
    assert sum("outside of all modules" in str(each.message) for each in caught) == 1


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("blend", [copy, other_numbers])
def test_copies_and_other_numbers_in_its_place_are_not_named(kind, blend):
    train("bf16-stochastic", kind, blend)


def test_an_average_that_is_gone_by_the_next_step_is_passed_over():
    def remove(average, key, weight):
        average.pop(key, None)

    train("bf16-stochastic", dict, remove)
