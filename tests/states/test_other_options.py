"""State dicts of optimizers with other options, and options that change between steps."""

import copy

import pytest
import torch
from torch import nn

import torch_bf16


def stepped(make, **options):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(4, 4))
    optimizer = make([("w", p)], lr=1e-3, **options)
    take_step(optimizer)
    return optimizer


def take_step(optimizer):
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()


OURS, TORCHS = torch_bf16.AdamW, torch.optim.AdamW


@pytest.mark.parametrize(
    ("mine", "theirs", "error", "match"),
    [
        ((OURS, "cautious"), (OURS, "update_clipping"), NotImplementedError, "cautious=True and"),
        ((OURS, "cautious"), (OURS, "amsgrad"), NotImplementedError, "with amsgrad=True"),
        ((OURS, "update_clipping"), (TORCHS, "amsgrad"), NotImplementedError, "with amsgrad=True"),
        (
            (torch_bf16.Adam, "decoupled_weight_decay", "fully_decoupled_weight_decay"),
            (torch.optim.Adam,),
            ValueError,
            "fully_decoupled_weight_decay=0.001 in parameter group 0: this optimizer adds",
        ),
    ],
)
@pytest.mark.parametrize("how", ["load_state_dict", "check_state_dict"])
def test_options_that_cannot_be_together_are_refused_before_anything_is_loaded(
    mine, theirs, error, match, how
):
    ours, saved = (
        stepped(kind, **dict.fromkeys(options, True)) for kind, *options in (mine, theirs)
    )
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(error, match=f"^after loading, .*{match}.* No state was changed$"):
        getattr(ours, how)(saved.state_dict())
    assert ours.state_dict()["param_groups"] == before["param_groups"]
    assert torch.equal(ours.state_dict()["state"][0]["exp_avg"], before["state"][0]["exp_avg"])
    take_step(ours)


@pytest.mark.parametrize(
    ("kind", "switched", "missing"),
    [
        (torch_bf16.RMSprop, {"centered": True}, "grad_avg, which rmsprop_centered keeps"),
        (torch_bf16.Muon, {"use_muon": False}, "exp_avg, which adamw keeps"),
    ],
)
def test_an_option_that_needs_states_of_all_steps_cannot_be_switched_on_in_between(
    kind, switched, missing
):
    optimizer = stepped(kind)
    optimizer.param_groups[0].update(switched, betas=(0.9, 0.99))
    (name,) = switched
    with pytest.raises(
        torch_bf16.StateMismatchError,
        match=f"counts 1 steps and has no {missing} .* option was changed .*{name} of .*set it "
        "back: .* Nothing was updated$",
    ):
        take_step(optimizer)
    optimizer.param_groups[0].update(dict.fromkeys(switched, not switched[name]))
    take_step(optimizer)
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == 2
