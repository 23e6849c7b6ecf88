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


@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])
def test_weights_that_their_module_has_recast_are_named_and_trained_in_fp32(said, recipe):
    """As by pytorch-metric-learning's ArcFace, whose weight takes the dtype of the embeddings."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in (model[:2], model[2])]
    model, (first, alone) = torch_bf16.prepare(model, optimizers, recipe)
    for each in model[1:]:
        each.weight.data = each.weight.data.float()
    before = model[1].weight.detach().clone()
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        first.step()
        alone.step()
    lines = said()
    assert ["'1.weight'" in lines[0], "'2.weight'" in lines[1]] == [True, True]
    assert all("keep_fp32" in line and "float32 again" in line for line in lines)
    # Not that the model was never cast.
    assert len(lines) == 2
    assert (before - model[1].weight).allclose(torch.full((4, 4), 2e-3), rtol=0.05)
    exact = recipe == "bf16-fp32-master"
    assert ("remainder16" in first.state[model[0].weight]) is exact
    assert "remainder16" not in first.state[model[1].weight]


def test_weight_recast_after_its_state_has_its_remainder_is_refused_with_the_cause():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = torch_bf16.prepare(model, optimizer, "bf16-fp32-master")
    optimizer.load_state_dict(optimizer.state_dict())  # as Accelerate's wrapper does at once
    model.float()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(torch_bf16.StateMismatchError, match=r"float32 again.*dtype.*keep_fp32"):
        optimizer.step()


@pytest.mark.parametrize("body", ["trained", "frozen"])
@pytest.mark.parametrize("cast", [False, True])
def test_a_layer_that_is_added_in_fp32_is_named_and_the_remedy_works(said, cast, body):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    torch_bf16.prepare(model, optimizer, "bf16-stochastic")
    head = torch.nn.Linear(4, 4, bias=False)
    for step in range(4):
        if step == 2:
            model.requires_grad_(body == "trained")
            if cast:
                torch_bf16.cast_model(head, optimizer.recipe)
            optimizer.add_param_group({"params": head.parameters()})
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = torch.ones_like(p) if p.requires_grad else None
        optimizer.step()
    assert head.weight.dtype == (torch.bfloat16 if cast else torch.float32)
    if cast:
        assert said() == []
    else:
        (line,) = said()
        assert "1 float32 matrices, the first of shape (4, 4), joins bfloat16 weights" in line


def test_nothing_is_said_of_fp32_layers_that_were_kept_or_joined_from_the_start(said):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    recipe = torch_bf16.get_recipe("bf16-stochastic", keep_fp32=("1",))
    torch_bf16.cast_model(model, recipe)
    optimizer = torch_bf16.AdamW(model[0].parameters(), recipe=recipe)
    optimizer.add_param_group({"params": torch.nn.Linear(4, 4).parameters()})
    for p in model[0].parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for each in model[1:]:
        optimizer.add_param_group({"params": each.parameters()})
    assert said() == []


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
