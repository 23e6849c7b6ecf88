"""A plan lasts while the same tensors take part, and every change is seen by the next step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16.backends import cuda_graphs
from torch_bf16.engine.recording import Recording

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
    plan = optimizer._engine.plan
    for lr in (1e-3, 1e-4):
        optimizer.param_groups[0]["lr"] = lr
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    assert optimizer._engine.plan is plan


def test_hyperparameters_count_also_in_a_group_that_replaced_another():
    optimizer, parameters = trained()
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.0}
    optimizer.step()
    assert all(map(torch.equal, parameters, before))


def test_no_graph_is_captured_on_a_device_where_nothing_has_a_gradient(monkeypatch):
    """torch warns of empty graphs."""
    optimizer, (first, *_) = trained()
    captured = []
    monkeypatch.setattr(cuda_graphs, "record", lambda launch, device: captured.append(device))
    plan = optimizer._engine.plan
    # Stands for parts of the plan that are elsewhere.
    plan.devices = {first.device, torch.device("cuda", 1)}
    monkeypatch.setattr(Recording, "_bring", lambda self, groups, inputs: None)
    plan.record(optimizer.param_groups)
    assert captured == [first.device]


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


def drop_key(optimizer, parameter):
    optimizer.state[parameter].pop("exp_avg")


def replace_state(optimizer, parameter):
    optimizer.state[parameter] = dict(optimizer.state[parameter])


def replace_moment(optimizer, parameter):
    state = optimizer.state[parameter]
    state["exp_avg"] = state["exp_avg"].clone()


def move_moment(optimizer, parameter):
    state = optimizer.state[parameter]
    state["exp_avg"].data = state["exp_avg"].data.clone()


def move_weight(optimizer, parameter):
    parameter.data = parameter.data.clone()


def stride_weight(optimizer, parameter):
    parameter.data = parameter.data.t()


def widen_gradient(optimizer, parameter):
    if not hasattr(parameter, "grad_dtype"):
        pytest.skip(f"torch {torch.__version__} gives a bf16 parameter no fp32 gradient")
    parameter.grad_dtype = None
    parameter.grad = parameter.grad.float()


def keep_a_note(optimizer, parameter):
    optimizer.state[parameter]["note"] = "mine"


CHANGES = [
    drop_key, replace_moment, move_moment, move_weight, stride_weight, widen_gradient,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_any_tensor_is_seen_at_the_next_step(change):
    optimizer, parameters = trained(steps=4)
    plan = optimizer._engine.plan
    assert plan._guard is not None
    change(optimizer, parameters[1])
    groups = optimizer._setting()
    assert not plan.fits(groups, parameters, optimizer.state)


@pytest.mark.parametrize("change", [replace_state, keep_a_note])
def test_a_state_that_only_looks_otherwise_keeps_its_plan(change):
    optimizer, parameters = trained(steps=4)
    plan = optimizer._engine.plan
    change(optimizer, parameters[1])
    for _ in range(3):
        optimizer.step()
        assert optimizer._engine.plan is plan
    move_moment(optimizer, parameters[1])
    optimizer.step()
    assert optimizer._engine.plan is not plan


def test_a_parameter_that_changed_its_group_takes_the_step_of_the_new_one():
    one, other = (torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(2))
    groups = [{"params": [one], "lr": 0.5}, {"params": [other], "lr": 0.0}]
    optimizer = torch_bf16.SGD(groups, lr=1.0)
    one.grad = torch.ones_like(one)
    optimizer.step()
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]
    optimizer.step()
    assert torch.equal(one.detach(), torch.full((4, 4), -0.5))


def test_a_copy_sees_a_weight_that_was_written_before_its_first_step():
    weight = nn.Parameter(torch.randn(8, 8).to(BF16))
    optimizer = torch_bf16.AdamW([weight], lr=1e-2, recipe="bf16-fp32-master")
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    weight = twin.param_groups[0]["params"][0]
    with torch.no_grad():
        weight.fill_(1.0)
    assert torch.equal(twin.exact_weight(weight), torch.ones(weight.shape))
    assert twin._step_supports_amp_scaling


class Unsliced(list):
    """Groups whose predecessors nobody goes through for each parameter anew."""

    def __getitem__(self, index):
        assert not isinstance(index, slice)
        return super().__getitem__(index)


def test_a_parameters_place_is_counted_once_for_all_groups():
    parameters = [nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
    optimizer = torch_bf16.AdamW([{"params": [p]} for p in parameters])
    optimizer.param_groups = Unsliced(optimizer.param_groups)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    names = optimizer._engine.names
    assert names.known(optimizer.param_groups) == [[None], [None], [None]]
    assert [*names.keys(optimizer.param_groups).values()] == ["#0", "#1", "#2"]
