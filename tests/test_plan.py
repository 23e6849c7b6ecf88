"""A plan lasts while the same tensors take part, and every change is seen by the next step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_bf16

BF16 = torch.bfloat16


def trained(steps=2, names=None):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(8, 8).to(BF16)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    given = parameters if names is None else list(zip(names, parameters, strict=True))
    optimizer = torch_bf16.AdamW(given, lr=1e-2)
    for _ in range(steps):
        optimizer.step()
    return optimizer, parameters


def test_a_plan_outlives_new_gradients_and_hyperparameters():
    optimizer, parameters = trained()
    plan = optimizer._plan
    for lr in (1e-3, 1e-4):
        optimizer.param_groups[0]["lr"] = lr
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    assert optimizer._plan is plan


def test_hyperparameters_count_also_in_a_group_that_replaced_another():
    optimizer, parameters = trained()
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.0}
    optimizer.step()
    assert all(map(torch.equal, parameters, before))


def fill(state):
    state["step"].fill_(40)


def replace(state):
    state["step"] = torch.tensor(40.0)


def replace_memory(state):
    state["step"].data = torch.tensor(40.0)


@pytest.mark.parametrize("write", [fill, replace, replace_memory])
def test_a_step_number_written_from_outside_is_counted_on_from(write):
    optimizer, parameters = trained()
    write(optimizer.state[parameters[1]])
    optimizer.step()
    assert [optimizer.state[each]["step"].item() for each in parameters] == [3, 41, 3]


def test_tensors_at_different_steps_each_get_the_scalars_of_their_own():
    """One of them, alone in an optimizer, goes the same way."""
    late, twin = (nn.Parameter(torch.ones(8, 8, dtype=BF16)) for _ in range(2))
    alone = torch_bf16.AdamW([("late", twin)], lr=1e-2)
    late.grad, twin.grad = (torch.full_like(late, 0.5) for _ in range(2))
    optimizer, parameters = trained(names=["a", "b", "c"])
    optimizer.add_param_group({"params": [("late", late)]})
    for _ in range(3):
        optimizer.step()
        alone.step()
        assert torch.equal(late, twin)
    assert optimizer.state[parameters[0]]["step"].item() == 5


def test_a_renamed_parameter_draws_the_noise_of_its_new_name():
    one, (first, *_) = trained(names=["a", "b", "c"])
    other, (second, *_) = trained(names=["a", "b", "c"])
    other.param_groups[0]["param_names"][0] = "d"
    assert torch.equal(first, second)
    one.step()
    other.step()
    assert not torch.equal(first, second)
