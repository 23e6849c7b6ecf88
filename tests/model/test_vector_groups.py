"""Parameters of one dimension in groups of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import torch_bf16


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))


def shapes(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[p.ndim for p in group["params"]] for group in optimizer.param_groups]


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(ValueError, match="separate_vectors takes an optimizer, not a Sequential"):
        torch_bf16.separate_vectors(model())


def test_mixed_groups_are_cut_in_two_and_others_stay():
    module = model()
    groups = [
        {"params": [*module[0].parameters()], "lr": 1e-2},
        {"params": [*module[1].parameters()], "lr": 1e-3},
        {"params": [*module[2].parameters()], "lr": 1e-4},
    ]
    optimizer = torch_bf16.AdamW(groups)
    assert torch_bf16.separate_vectors(optimizer)
    assert shapes(optimizer) == [[2], [1, 1], [2], [1]]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-3, 1e-4, 1e-2]
    assert not torch_bf16.separate_vectors(optimizer)


def test_vectors_that_are_stored_like_matrices_stay_with_them():
    recipe = torch_bf16.get_recipe("bf16-stochastic", vectors="like_matrices")
    optimizer = torch_bf16.AdamW(model().parameters(), recipe=recipe)
    assert not torch_bf16.separate_vectors(optimizer)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("converted", [False, True], ids=["named-groups", "converted"])
def test_names_follow_and_so_the_noise_stays(converted):
    def train(separate: bool) -> list[torch.Tensor]:
        module = torch_bf16.cast_model(model())
        if converted:
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
            torch_bf16.convert(optimizer, model=module)
        else:
            optimizer = torch_bf16.AdamW(module.named_parameters(), lr=1e-3)
        if separate:
            torch_bf16.separate_vectors(optimizer)
        for step in range(3):
            torch.manual_seed(step)
            module(torch.randn(8, 4).bfloat16()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*module.parameters()]

    for one, other in zip(train(False), train(True), strict=True):
        assert torch.equal(one, other)


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.5**n),
    "LambdaLR, one each": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 0.5**n]),
    "Multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.5),
    "Cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "OneCycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10),
    "Cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, 3, cycle_momentum=False),
    "Plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "Sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "Chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_exists_already_drives_the_new_groups_too(name):
    optimizer = torch_bf16.AdamW(model().parameters(), lr=1e-2)
    scheduler = SCHEDULERS[name](optimizer)
    torch_bf16.separate_vectors(optimizer, [scheduler])
    for _ in range(4):
        optimizer.step()
        scheduler.step(*[1.0] * (name == "Plateau"))
        (lr,) = {group["lr"] for group in optimizer.param_groups}
    assert lr != 1e-2
    assert len(scheduler.get_last_lr()) == 2
    scheduler.load_state_dict(scheduler.state_dict())
