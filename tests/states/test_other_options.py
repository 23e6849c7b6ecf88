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
    with pytest.raises(error, match=f"^after loading, .*{match}.* Nothing was changed$"):
        getattr(ours, how)(saved.state_dict())
    assert ours.state_dict()["param_groups"] == before["param_groups"]
    assert torch.equal(ours.state_dict()["state"][0]["exp_avg"], before["state"][0]["exp_avg"])
    take_step(ours)
