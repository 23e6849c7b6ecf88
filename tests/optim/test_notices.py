"""What is said, once, where a user cannot have meant what happens."""

import logging

import pytest
import torch

import torch_bf16


@pytest.fixture
def said(caplog):
    with caplog.at_level(logging.WARNING, "torch_bf16"):
        yield lambda: [record.getMessage() for record in caplog.records]


def take_steps(model, recipe, n=2):
    optimizer = torch_bf16.AdamW(model.parameters(), recipe=recipe)
    for _ in range(n):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def test_a_forgotten_cast_is_pointed_out_once(said):
    take_steps(torch.nn.Linear(4, 4), "bf16-stochastic")
    (line,) = said()
    assert "trains float32 parameters only" in line
    assert "torch_bf16.cast_model(model, 'bf16-stochastic')" in line


def test_a_cast_for_masters_that_the_optimizer_does_not_keep_is_refused():
    model = torch_bf16.cast_model(torch.nn.Linear(4, 4), "bf16-fp32-master")
    before = model.weight.detach().clone()
    match = "cast for exact masters, and recipe 'bf16-stochastic' .* keeps none for 1 of .*prepare"
    with pytest.raises(ValueError, match=match):
        take_steps(model, "bf16-stochastic")
    assert torch.equal(model.weight, before)


def test_a_weight_that_its_module_has_recast_is_named_and_trained_in_fp32(said):
    """As by pytorch-metric-learning's ArcFace, whose weight takes the dtype of the embeddings."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    model, optimizer = torch_bf16.prepare(model, optimizer, "bf16-fp32-master")
    model[1].weight.data = model[1].weight.data.float()
    before = model[1].weight.detach().clone()
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
    (line,) = said()
    assert "'1.weight' was cast to bfloat16 and is float32 again" in line
    assert "keep_fp32" in line
    assert (before - model[1].weight).allclose(torch.full((4, 4), 2e-3), rtol=0.05)
    assert "remainder16" in optimizer.state[model[0].weight]
    assert "remainder16" not in optimizer.state[model[1].weight]


@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])
def test_nothing_is_said_where_both_have_one_recipe(said, recipe):
    model = torch_bf16.cast_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), recipe)
    take_steps(model, recipe)
    assert said() == []


def test_nothing_is_said_of_a_model_with_some_fp32_matrices(said):
    recipe = torch_bf16.get_recipe("bf16-stochastic", keep_fp32=("1",))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    take_steps(torch_bf16.cast_model(model, recipe), recipe)
    assert said() == []
