"""What a state holds that the rule does not use: the user's entries, a momentum that is off."""

import copy
import pickle

import pytest
import torch
from torch import nn

import torch_bf16

BF16 = torch.bfloat16


def begun(kind, **options):
    parameters = [nn.Parameter(torch.ones(4, 4).to(BF16)) for _ in range(2)]
    optimizer = kind(parameters, lr=0.1, **options)
    step(optimizer, 1)
    return optimizer, parameters[0]


def step(optimizer, number):
    """Of the first parameters: another number of them than last time is planned for anew."""
    optimizer.zero_grad()
    for each in optimizer.param_groups[0]["params"][:number]:
        each.grad = torch.ones_like(each)
    optimizer.step()


@pytest.mark.parametrize("kind", [torch_bf16.AdamW, torch_bf16.SGD, torch_bf16.Muon])
def test_the_users_own_entries_stay(kind):
    optimizer, p = begun(kind)
    mask = optimizer.state[p]["mask"] = torch.ones(3)
    optimizer.state[p]["note"] = "kept"
    for number in (1, 2, 1):
        step(optimizer, number)
        assert optimizer.state[p]["mask"] is mask
    optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    step(optimizer, 2)
    assert torch.equal(optimizer.state[p]["mask"], mask)
    assert optimizer.state[p]["note"] == "kept"


def test_an_entry_before_the_first_step_is_saved():
    optimizer = torch_bf16.NAdam([nn.Parameter(torch.ones(4, 4).to(BF16))])
    optimizer.state[optimizer.param_groups[0]["params"][0]]["note"] = "kept"
    assert optimizer.state_dict()["state"] == {0: {"note": "kept"}}


@pytest.mark.parametrize("kind", [torch_bf16.AdamW, torch_bf16.NAdam, torch_bf16.Adagrad])
def test_an_entry_of_the_whole_optimizer_is_loaded_and_copied(kind):
    optimizer, _ = begun(kind)
    optimizer.state["rounds"] = 3
    other, _ = begun(kind)
    other.load_state_dict(optimizer.state_dict())
    for each in (other, copy.deepcopy(optimizer)):
        step(each, 2)
        assert each.state["rounds"] == 3


def test_an_entry_that_is_replaced_at_every_step_is_planned_for_once():
    optimizer, p = begun(torch_bf16.AdamW)
    optimizer.state[p]["mean"] = torch.zeros(())
    step(optimizer, 2)
    plan = optimizer._engine.plan
    for _ in range(3):
        optimizer.state[p]["mean"] = optimizer.state[p]["mean"] + 1
        step(optimizer, 2)
        assert optimizer._engine.plan is plan


@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])
@pytest.mark.parametrize("saved", [False, True])
def test_momentum_that_is_off_for_a_while_goes_on_from_where_it_was(recipe, saved):
    optimizer, p = begun(torch_bf16.SGD, momentum=0.9, recipe=recipe)
    buffer = optimizer.state[p]["momentum_buffer"].clone()
    for momentum in (0.0, 0.9):
        optimizer.param_groups[0]["momentum"] = momentum
        if saved:
            optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
        step(optimizer, 2)
    assert torch.allclose(optimizer.state[p]["momentum_buffer"], 0.9 * buffer + 1, rtol=2**-8)


def test_an_entry_of_another_format_is_not_kept():
    optimizer, _ = begun(torch_bf16.AdamW, recipe=torch_bf16.Recipe(exp_avg="int8"))
    saved = optimizer.state_dict()
    other = torch_bf16.AdamW([nn.Parameter(torch.ones(4, 4).to(BF16)) for _ in range(2)], lr=0.1)
    other.load_state_dict(saved)
    (state,) = other.state.values()
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
