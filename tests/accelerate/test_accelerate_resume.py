"""save_state and load_state: a resumed run is the uninterrupted one."""

from __future__ import annotations

import copy

import pytest
import torch
from small_model import Counter
from torch.nn.functional import mse_loss


def start(make_accelerator, mode, model_class, tmp_path):
    accelerator = make_accelerator(mode, project_dir=str(tmp_path))
    model = model_class()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def train(accelerator, model, optimizer, scheduler, batches):
    for x, y in batches:
        # The noise on the inputs makes the run depend on torch's own generator too.
        loss = mse_loss(model(x + 0.1 * torch.randn_like(x)), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def everything(model, optimizer):
    tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{name}.{key}"] = value
    return tensors


@pytest.mark.parametrize("saved_after", [12, 0])
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    make_accelerator, mode, model, batches, tmp_path, saved_after
):
    run = start(make_accelerator, mode, type(model), tmp_path)
    accelerator, *objects = run
    accelerator.register_for_checkpointing(counter := Counter())
    counter.value = 12
    train(accelerator, *objects, batches[:saved_after])
    accelerator.save_state(str(tmp_path / "state"))
    train(accelerator, *objects, batches[saved_after:30])
    expected = everything(*objects[:2])

    torch.manual_seed(99)
    accelerator, *objects = start(make_accelerator, mode, type(model), tmp_path)
    accelerator.register_for_checkpointing(counter := Counter())
    accelerator.load_state(str(tmp_path / "state"))
    assert counter.value == 12
    train(accelerator, *objects, batches[saved_after:30])
    found = everything(*objects[:2])

    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def test_a_script_may_load_before_prepare(make_accelerator, mode, model, batches):
    def prepared(saved=None):
        accelerator = make_accelerator(mode)
        fresh = type(model)()
        optimizer = torch.optim.AdamW(fresh.parameters(), lr=1e-2)
        if saved is not None:
            fresh.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        return accelerator, *accelerator.prepare(fresh, optimizer, scheduler)

    accelerator, *objects = prepared()
    train(accelerator, *objects, batches[:12])
    saved = copy.deepcopy([each.state_dict() for each in objects[:2]])
    _, *again = prepared(saved)
    for each in (objects, again):
        torch.manual_seed(1)
        train(accelerator, *each, batches[12:20])
    expected, found = everything(*objects[:2]), everything(*again[:2])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_resume_after_some_steps_of_another_run_drops_what_they_left(
    make_accelerator, mode, model, batches, tmp_path
):
    accelerator, *objects = start(make_accelerator, mode, type(model), tmp_path)
    train(accelerator, *objects, batches[:5])
    accelerator.save_state(str(tmp_path / "state"))
    train(accelerator, *objects, batches[5:10])
    expected = everything(*objects[:2])
    expected = {name: value.clone() for name, value in expected.items()}
    accelerator.load_state(str(tmp_path / "state"))
    train(accelerator, *objects, batches[5:10])
    found = everything(*objects[:2])
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
