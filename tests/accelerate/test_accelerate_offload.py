"""``offload="states"`` by Accelerate: states in host memory, with the same bits."""

from __future__ import annotations

import copy

import pytest
import torch
from slow_bus import ORDERS, use

import torch_bf16
from accelerate_bf16 import BF16RecipeKwargs


def kept(model, optimizer):
    return {
        **{f"weight {name}": p.detach().clone() for name, p in model.named_parameters()},
        **{
            f"{number} {key}": torch.as_tensor(each).clone().view(-1).view(torch.uint8)
            for number, state in optimizer.state_dict()["state"].items()
            for key, each in state.items()
        },
    }


@pytest.mark.parametrize("how", ["handler", "environment"])
def test_a_loop_clips_accumulates_and_resumes(
    make_accelerator, monkeypatch, model, batches, train, mode, how, tmp_path
):
    bus, found = use(monkeypatch, ORDERS[1]), []
    for offload in ("none", "states"):
        handlers = [BF16RecipeKwargs(offload=offload)] if how == "handler" else []
        if how == "environment":
            monkeypatch.setenv("BF16_OFFLOAD", offload)
        accelerator = make_accelerator(
            mode, kwargs_handlers=handlers, gradient_accumulation_steps=2
        )
        mine = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(mine.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        mine, optimizer, scheduler = accelerator.prepare(mine, optimizer, scheduler)
        train(accelerator, mine, optimizer, batches[:4], scheduler)
        accelerator.save_state(tmp_path / how / offload)
        train(accelerator, mine, optimizer, batches[4:8], scheduler)
        found.append(kept(mine, optimizer))
        accelerator.load_state(tmp_path / how / offload)
        train(accelerator, mine, optimizer, batches[4:8], scheduler)
        found.append(kept(mine, optimizer))
    for other in found[1:]:
        for name, expected in found[0].items():
            assert torch.equal(other[name], expected), name
    assert "down" in bus.log


def test_a_mistake_is_named(make_accelerator, monkeypatch, model):
    monkeypatch.setenv("BF16_OFFLOAD", "cpu")
    accelerator = make_accelerator("bf16-stochastic")
    with pytest.raises(
        ValueError, match="offload='cpu' does not say what is to live in host memory"
    ):
        accelerator.prepare(model, torch_bf16.AdamW(model.parameters()))
