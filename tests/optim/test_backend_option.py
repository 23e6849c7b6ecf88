"""The backend by an argument, by a recipe, by the environment: in this order, and with one word."""

import pickle

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16 import SGD, AdamW, Recipe, backends, get_recipe
from torch_bf16.errors import BackendUnavailableError
from torch_bf16.tools import describe as describing


def used(optimizer):
    """The backend that takes the steps of an optimizer."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer._engine.plan._launches[0].batch.backend.name


def weights():
    return [nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))]


EAGER = get_recipe("bf16-stochastic", backend="eager")


def test_arguments_win_over_the_recipe_and_that_over_the_environment(monkeypatch):
    assert used(AdamW(weights())) == "cpu"
    assert used(AdamW(weights(), recipe=EAGER)) == "eager"
    assert used(AdamW(weights(), recipe=EAGER, backend="cpu")) == "cpu"
    monkeypatch.setenv("TORCH_BF16_BACKEND", "eager")
    assert used(AdamW(weights())) == "eager"
    assert used(AdamW(weights(), recipe=get_recipe(EAGER, backend="cpu"))) == "cpu"
    assert used(torch_bf16.convert(torch.optim.SGD(weights(), lr=0.1), EAGER)) == "eager"
    cpu = torch_bf16.convert(torch.optim.SGD(weights(), lr=0.1), EAGER, backend="cpu")
    assert used(cpu) == "cpu"


def test_prepare_hands_the_recipes_backend_to_optimizers_that_exist():
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), lr=0.1)
    torch_bf16.prepare(model, optimizer, EAGER)
    assert used(optimizer) == "eager"
    assert describing.describe(model, optimizer).backend == "eager"
    torch_bf16.prepare(model, optimizer, EAGER, backend="cpu")
    assert used(optimizer) == "cpu"
    torch_bf16.prepare(model, optimizer, EAGER)
    assert used(optimizer) == "cpu"


def test_an_unknown_backend_is_refused_by_the_recipe():
    with pytest.raises(ValueError, match="unknown backend 'gpu'; known backends: cpu, eager, trit"):
        Recipe(backend="gpu")
    with pytest.raises(ValueError, match="unknown backend 7; known backends: cpu, eager, triton"):
        get_recipe("bf16-stochastic", backend=7)


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("tritn", ValueError, "unknown backend 'tritn'; known backends: cpu"),
        ("triton", BackendUnavailableError, "backend 'triton' was asked for and cannot run on cpu"),
    ],
)
def test_a_backend_that_the_environment_names_is_refused_with_the_variables_name(
    name, error, match, monkeypatch
):
    monkeypatch.setenv("TORCH_BF16_BACKEND", name)
    match = f"^TORCH_BF16_BACKEND: {match}"
    with pytest.raises(error, match=match):
        used(AdamW(weights()))
    with pytest.raises(error, match=match):
        backends.squares(weights())
    with pytest.raises(error, match=match.replace("TORCH_BF16_BACKEND: ", "")):
        backends.choose(torch.device("cpu"), name)


def test_recipes_that_differ_in_it_are_equal_and_state_dicts_do_not_hold_it():
    assert get_recipe("bf16-stochastic") == EAGER
    assert hash(EAGER) == hash(get_recipe("bf16-stochastic"))
    assert pickle.loads(pickle.dumps(EAGER)).backend == "eager"
    optimizer = AdamW(weights(), recipe=EAGER)
    used(optimizer)
    saved = optimizer.state_dict()
    assert "backend" not in str(saved["torch_bf16"])
    other = AdamW(weights(), recipe=get_recipe("bf16-stochastic", backend="cpu"))
    other.load_state_dict(saved)
    assert (other.recipe.backend, used(other)) == ("cpu", "cpu")
