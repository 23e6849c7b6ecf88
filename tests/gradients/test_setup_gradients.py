"""What a host's plugin calls once a model is wrapped sets up what the recipe says, and no more."""

import gc

import pytest
import torch

import torch_bf16
from torch_bf16 import plugin_api


def made(**fields):
    recipe = torch_bf16.get_recipe("bf16-stochastic", **fields)
    model = torch_bf16.cast_model(torch.nn.Linear(16, 8), recipe)
    return model, torch_bf16.AdamW(model.named_parameters(), lr=0.1, recipe=recipe)


def given(**options):
    return plugin_api.release_options({"release_gradients": True, **options})


def test_a_recipe_that_leaves_gradients_to_torch_gets_nothing():
    model, optimizer = made()
    assert torch_bf16.setup_gradients(model, optimizer) is None
    engine = optimizer._engine
    assert (engine.accumulation, engine.release, engine.reduction_checked) == (None, None, False)


def test_sums_and_reduction_are_the_recipes():
    model, optimizer = made(accumulate="bf16_stochastic", reduce="bf16_wire")
    assert torch_bf16.setup_gradients(model, optimizer) is None
    engine = optimizer._engine
    assert engine.accumulation.format == "bf16_stochastic"
    assert engine.reduction_checked


def test_a_release_takes_its_steps_inside_the_backward_pass_until_it_is_removed():
    model, optimizer = made()
    options = given(release_max_norm=0.5, release_norm="last_step", release_accumulation_steps=2)
    handle = torch_bf16.setup_gradients(model, optimizer, options)
    weight = model.weight.detach().clone()
    for moved in (False, True):
        model(torch.randn(4, 16).bfloat16()).float().square().mean().backward()
        assert torch.equal(model.weight, weight) is not moved
    assert handle.by_last_step
    assert model.weight.grad is None
    optimizer.step()
    handle.remove()
    assert optimizer._engine.release is None


def test_a_release_that_a_host_began_while_everything_was_frozen_ends_too():
    model, optimizer = made()
    model.requires_grad_(False)
    torch_bf16.setup_gradients(model, optimizer, given())
    model.requires_grad_(True)
    plugin_api.end_releases(model.parameters())
    assert optimizer._engine.release is None


def test_a_release_whose_optimizer_is_gone_ends_with_those_of_others():
    model, optimizer = made()
    handle = torch_bf16.setup_gradients(model, optimizer, given())
    del optimizer
    gc.collect()
    assert handle.abandoned
    plugin_api.end_releases(model.parameters())
    assert torch_bf16.clip_grad_norm_(model.parameters(), 1.0) == 0  # and is not refused


def test_releases_that_a_host_began_end_with_the_parameters_and_those_of_users_stay():
    model, optimizer = made()
    other, users = made()
    torch_bf16.setup_gradients(model, optimizer, given())
    handle = torch_bf16.release_gradients(other, users)
    parameters = [*model.parameters(), *other.parameters()]
    plugin_api.end_releases(other.parameters())
    plugin_api.end_releases(parameters, keep=[optimizer])
    assert optimizer._engine.release is not None
    plugin_api.end_releases(parameters)
    assert optimizer._engine.release is None
    assert users._engine.release is handle


def test_an_optimizer_inside_a_wrapper_of_a_host_is_found():
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    model, optimizer = made()
    handle = torch_bf16.setup_gradients(model, Wrapper(optimizer), given())
    assert optimizer._engine.release is handle


def test_an_optimizer_without_a_recipe_is_refused_by_name():
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"setup_gradients was given an SGD, .*by a recipe"):
        torch_bf16.setup_gradients(model, torch.optim.SGD(model.parameters()))
