"""State dicts of other classes load where their states mean the same, and are refused elsewhere."""

import copy
import itertools

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16.tools.estimate.optimizers import OPTIMIZERS

ADAMS = torch_bf16.AdamW, torch_bf16.Adam, torch_bf16.NAdam, torch_bf16.RAdam
REFUSED = [
    (torch_bf16.ADOPT, torch_bf16.AdamW),
    (torch_bf16.ADOPT, torch_bf16.RAdam),
    (torch_bf16.ADOPT, torch_bf16.Lion),
    *((each, torch_bf16.Lion) for each in ADAMS),
]


def stepped(make, **options):
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = make([p], lr=1e-3, **options)
    p.grad = torch.full((4, 4), 0.5)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("theirs", "ours"), REFUSED)
@pytest.mark.parametrize("how", ["load_state_dict", "check_state_dict"])
def test_states_that_mean_something_else_are_refused(theirs, ours, how):
    class Mine(ours):
        pass

    saved, optimizer = stepped(theirs).state_dict(), stepped(Mine)
    before = copy.deepcopy(optimizer.state_dict())
    match = "its states have the same names and mean something else.* No state was changed$"
    with pytest.raises(torch_bf16.StateMismatchError, match=match):
        getattr(optimizer, how)(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert torch.equal(after["state"][0]["exp_avg"], before["state"][0]["exp_avg"])
    # Files from before there were families, and those without our entry.
    del saved["torch_bf16"]["family"]
    optimizer.load_state_dict(saved)
    optimizer.step()


@pytest.mark.parametrize("theirs", [torch_bf16.AdamW, torch_bf16.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("ours", [torch_bf16.AdamW, torch_bf16.Adam])
def test_moments_of_adam_move_between_its_classes(theirs, ours):
    saved, optimizer = stepped(theirs), stepped(ours)
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    (state,), (known,) = optimizer.state.values(), saved.state.values()
    assert torch.equal(state["exp_avg"].float(), known["exp_avg"].float())
    optimizer.step()


def test_a_converted_optimizer_has_the_family_of_ours():
    converted = torch_bf16.convert(torch.optim.RAdam([nn.Parameter(torch.ones(4, 4))]))
    with pytest.raises(
        torch_bf16.StateMismatchError, match=r"of the adopt family and this .*RAdam"
    ):
        converted.load_state_dict(stepped(torch_bf16.ADOPT).state_dict())


def test_only_classes_of_one_family_load_states_of_each_other():
    with_all = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9, "centered": True}}
    # From their first momentum on, plain SGD and RMSprop keep it.
    made = {
        name: stepped(kind, backend="eager", **with_all.get(name, {}))
        for name, kind in OPTIMIZERS.items()
    }
    for theirs, ours in itertools.permutations(made, 2):
        saved = copy.deepcopy(made[theirs].state_dict())
        try:
            copy.deepcopy(made[ours]).load_state_dict(saved)
        except torch_bf16.StateMismatchError:
            continue
        family = OPTIMIZERS[ours].family or ours
        assert family == OPTIMIZERS[theirs].family, (
            f"{ours} loads states of {theirs}, which mean something else: give both a `family`"
        )
