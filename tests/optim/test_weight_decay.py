"""Fully decoupled weight decay: the schedule acts on it, the learning rate does not."""

import pytest
import torch
from torch import nn

import torch_bf16

OPTIMIZERS = {
    "adamw": (torch_bf16.AdamW, {}),
    "adam": (torch_bf16.Adam, {"decoupled_weight_decay": True}),
    "nadam": (torch_bf16.NAdam, {"decoupled_weight_decay": True}),
    "radam": (torch_bf16.RAdam, {"decoupled_weight_decay": True}),
    "adopt": (torch_bf16.ADOPT, {"decoupled_weight_decay": True}),
    "lion": (torch_bf16.Lion, {}),
    "cautious": (torch_bf16.AdamW, {"cautious": True}),
    "stable": (torch_bf16.AdamW, {"update_clipping": True}),
    "adafactor": (torch_bf16.Adafactor, {}),
    "muon": (torch_bf16.Muon, {}),
}


def decayed(name, lr, factor=1.0, steps=3, **options):
    """What zero gradients leave of weights of one, with the schedule at ``factor`` of its peak."""
    make, own = OPTIMIZERS[name]
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = make([parameter], lr=lr, weight_decay=0.01, **own, **options, backend="eager")
    optimizer.param_groups[0]["lr"] = lr * factor
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(steps):
        optimizer.step()
    return parameter.detach()[0, 0].item()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_decay_is_that_of_the_schedule_at_any_learning_rate(name):
    steps = 2 if name == "adopt" else 3  # its first step only measures the gradient
    for lr in (1e-3, 1e-6):
        for factor in (1.0, 0.5):
            left = decayed(name, lr, factor, fully_decoupled_weight_decay=True)
            assert left == pytest.approx((1 - 0.01 * factor) ** steps, abs=1e-6)
    # As torch does it, the same decay all but vanishes at the smaller rate.
    assert decayed(name, 1e-6) == pytest.approx(1.0, abs=1e-6)


def test_a_peak_may_be_named_and_a_group_may_have_its_own():
    left = decayed("adamw", 1e-4, fully_decoupled_weight_decay=1e-3)
    assert left == pytest.approx((1 - 0.001) ** 3, abs=1e-6)
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch_bf16.AdamW(
        [{"params": [first], "fully_decoupled_weight_decay": True}, {"params": [second]}], lr=0.5
    )
    found = [g.get("fully_decoupled_weight_decay") for g in optimizer.param_groups]
    assert found == [0.5, None]


def test_the_option_may_be_set_on_a_group_that_is_there():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    given = torch_bf16.AdamW(parameters[:1], lr=0.5, fully_decoupled_weight_decay=True)
    later = torch_bf16.AdamW(parameters[1:], lr=0.5)
    later.param_groups[0]["fully_decoupled_weight_decay"] = True
    for optimizer, p in zip((given, later), parameters, strict=True):
        p.grad = torch.zeros_like(p)
        optimizer.step()
        assert optimizer.param_groups[0]["fully_decoupled_weight_decay"] == 0.5
    assert torch.equal(*parameters)
    adam = torch_bf16.Adam(parameters, lr=0.5)
    adam.param_groups[0]["fully_decoupled_weight_decay"] = True
    with pytest.raises(ValueError, match=r"adds weight decay to the gradient.*Nothing was updated"):
        adam.step()


def test_a_converted_optimizer_keeps_the_option_of_its_groups():
    parameter = nn.Parameter(torch.ones(2))
    group = {"params": [parameter], "fully_decoupled_weight_decay": True}
    optimizer = torch_bf16.convert(torch.optim.AdamW([group], lr=0.25))
    assert optimizer.param_groups[0]["fully_decoupled_weight_decay"] == 0.25


def test_a_state_dict_that_does_not_know_the_option_leaves_it():
    parameter = nn.Parameter(torch.ones(2))
    saved = torch.optim.AdamW([parameter], lr=0.125).state_dict()
    optimizer = torch_bf16.AdamW([parameter], lr=0.25, fully_decoupled_weight_decay=True)
    optimizer.load_state_dict(saved)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["fully_decoupled_weight_decay"]) == (0.125, 0.25)


def test_where_decay_is_a_penalty_it_is_refused():
    with pytest.raises(ValueError, match="this optimizer adds weight decay to the gradient"):
        torch_bf16.Adam([nn.Parameter(torch.ones(2))], fully_decoupled_weight_decay=True)
    with pytest.raises(ValueError, match=r"True in parameter group 0 with lr=0.0: it must be the"):
        torch_bf16.AdamW([nn.Parameter(torch.ones(2))], 0.0, fully_decoupled_weight_decay=True)
