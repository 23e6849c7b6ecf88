"""Training through prepare, in one process."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import torch_bf16
from torch_bf16 import BF16Optimizer


def test_one_process_trains_in_bf16_and_keeps_identities(
    make_accelerator, train, mode, model, batches
):
    accelerator = make_accelerator(mode)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, wrapped = accelerator.prepare(model, optimizer)

    assert prepared is model
    assert wrapped.optimizer is optimizer
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert model.also_middle.weight is model.middle.weight
    assert isinstance(optimizer, torch_bf16.AdamW)
    assert optimizer.recipe == torch_bf16.get_recipe(mode)
    assert model.up.weight.dtype == torch.bfloat16
    assert model.scale.dtype == torch.float32
    assert model.batch_norm.weight.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32

    losses = train(accelerator, prepared, wrapped, batches * 4)
    assert sum(losses[-20:]) < 0.3 * sum(losses[:20])
    moments = torch.float32 if mode == "bf16-fp32-master" else torch.bfloat16
    assert optimizer.state[model.up.weight]["exp_avg"].dtype == moments
    assert optimizer.state[model.norm.weight]["remainder16"].dtype == torch.int16


def test_outputs_and_loss_are_fp32_and_inputs_stay_as_they_are(make_accelerator, mode, batches):
    seen = []

    class Spy(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen.append((x.dtype, y.dtype))
            return {"logits": y, "count": torch.ones((), dtype=torch.long)}

    accelerator = make_accelerator(mode)
    model = accelerator.prepare(Spy(8, 1))
    x, y = batches[0]
    output = model(x)
    assert seen == [(torch.float32, torch.bfloat16)]
    assert output["logits"].dtype == torch.float32
    assert output["count"].dtype == torch.long
    assert mse_loss(output["logits"], y).dtype == torch.float32


def test_every_order_of_arguments_gives_the_same_training(make_accelerator, train, model, batches):
    accelerator = make_accelerator("bf16-fp32-master")
    weights = []
    for order in itertools.permutations(range(4)):
        copied = copy.deepcopy(model)
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        loader = DataLoader(TensorDataset(torch.zeros(4, 1)))
        given = [copied, optimizer, loader, scheduler]
        result = accelerator.prepare(*(given[i] for i in order))
        prepared, wrapped, _, wrapped_scheduler = (result[order.index(i)] for i in range(4))

        train(accelerator, prepared, wrapped, batches[:2], wrapped_scheduler)
        assert isinstance(optimizer, torch_bf16.SGD), order
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 4)
        weights.append(copied.down.weight)
    assert all(torch.equal(each, weights[0]) for each in weights)


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_separate_calls_of_prepare_work_in_both_orders(
    make_accelerator, train, mode, model, batches, first
):
    accelerator = make_accelerator(mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if first == "model":
        prepared = accelerator.prepare(model)
        wrapped = accelerator.prepare(optimizer)
    else:
        wrapped = accelerator.prepare(optimizer)
        prepared = accelerator.prepare(model)
    assert isinstance(optimizer, BF16Optimizer)
    assert model.up.weight.dtype == torch.bfloat16
    losses = train(accelerator, prepared, wrapped, batches * 3)
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    assert "remainder16" in optimizer.state[model.norm.weight]


@pytest.mark.parametrize("before", [True, False], ids=["before-prepare", "after-prepare"])
@pytest.mark.parametrize("passed", [True, False], ids=["passed", "own"])
def test_schedulers_of_any_age_move_the_rate_of_our_step(
    make_accelerator, train, recwarn, model, batches, before, passed
):
    accelerator = make_accelerator("bf16-stochastic")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def make():
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    scheduler = make() if before else None
    prepared, wrapped = accelerator.prepare(model, optimizer)
    scheduler = scheduler or make()
    if passed:
        scheduler = accelerator.prepare(scheduler)
    train(accelerator, prepared, wrapped, batches[:3], scheduler)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 8)
    # The old class's step would have made fp32 states in torch's way.
    assert optimizer.state[model.up.weight]["exp_avg"].dtype == torch.bfloat16
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


def test_a_model_and_an_optimizer_that_are_prepared_by_their_own_methods_train(
    make_accelerator, train, mode, model, batches
):
    accelerator = make_accelerator(mode)
    prepared = accelerator.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped = accelerator.prepare_optimizer(optimizer)
    assert isinstance(optimizer, BF16Optimizer)
    losses = train(accelerator, prepared, wrapped, batches)
    assert losses[-1] < losses[0]


def test_several_models_and_optimizers_draw_different_noise(make_accelerator, batches):
    accelerator = make_accelerator("bf16-stochastic")
    one, other = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    other.load_state_dict(one.state_dict())
    both = nn.Linear(8, 8, bias=False)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (one, other)]
    shared = torch.optim.SGD([*one.parameters(), *both.parameters()], lr=1e-9)
    accelerator.prepare(optimizers[1], one, other, optimizers[0])
    accelerator.prepare(shared, both)
    assert all(isinstance(each, BF16Optimizer) for each in (*optimizers, shared))
    assert "'model_1.weight'" in optimizers[1].label(0, 0)
    assert "'model_2.weight'" in shared.label(0, 1)
    x = batches[0][0]
    for _ in range(3):
        for each, optimizer in zip((one, other), optimizers, strict=True):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not torch.equal(one.weight, other.weight)
    assert torch.allclose(one.weight.float(), other.weight.float(), atol=1e-2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models_train_the_same_bits(make_accelerator, train, mode, model, batches):
    ends = []
    for way in ("eager", "before", "by-the-accelerator"):
        options = {"dynamo_backend": "eager"} if way == "by-the-accelerator" else {}
        accelerator = make_accelerator(mode, **options)
        copied = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(copied.parameters(), lr=1e-2)
        given = torch.compile(copied, backend="eager") if way == "before" else copied
        prepared, wrapped = accelerator.prepare(given, optimizer)
        losses = train(accelerator, prepared, wrapped, batches[:3])
        assert prepared(batches[0][0]).dtype == torch.float32
        assert (type(prepared).__name__ == "OptimizedModule") == (way != "eager")
        assert getattr(prepared, "_orig_mod", prepared) is copied
        ends.append((losses, {n: p.clone() for n, p in copied.state_dict().items()}))
        AcceleratorState._reset_state()
    for losses, weights in ends[1:]:
        assert losses == ends[0][0]
        assert all(torch.equal(weights[n], p) for n, p in ends[0][1].items())


def test_accumulation_steps_once_per_window(make_accelerator, train, mode, model, batches):
    accelerator = make_accelerator(mode, gradient_accumulation_steps=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    losses = train(accelerator, prepared, wrapped, batches[:32])
    assert optimizer.state[model.up.weight]["step"] == 8
    assert losses[-1] < losses[0]


def test_clipping_by_value_limits_every_gradient(make_accelerator, mode, model, batches):
    accelerator = make_accelerator(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    x, y = batches[0]
    accelerator.backward(100 * mse_loss(prepared(x), y))
    accelerator.clip_grad_value_(prepared.parameters(), 0.125)
    assert max(p.grad.abs().max() for p in model.parameters()) == 0.125
    wrapped.step()


def test_optimizer_state_from_fp32_training_is_taken_over_exactly(make_accelerator, model, batches):
    from torch_bf16.numerics.rounding import join16

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in batches[:3]:
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    weight, moment = model.up.weight.detach().clone(), optimizer.state[model.up.weight]["exp_avg"]
    accelerator = make_accelerator("bf16-fp32-master")
    accelerator.prepare(optimizer, model)
    state = optimizer.state[model.up.weight]
    assert torch.equal(state["exp_avg"], moment)
    assert torch.equal(join16(model.up.weight.detach(), state["remainder16"]), weight)
    assert state["step"] == 3


def test_two_accelerators_in_one_process(make_accelerator, train, mode, batches):
    for _ in range(2):
        accelerator = make_accelerator(mode)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        prepared, wrapped = accelerator.prepare(model, optimizer)
        train(accelerator, prepared, wrapped, batches[:3])
        assert model.weight.dtype == torch.bfloat16


def test_an_optimizer_of_ours_keeps_the_users_recipe(make_accelerator, train, model, batches):
    from torch_bf16.numerics.rounding import join16

    weight = model.up.weight.detach().clone()
    accelerator = make_accelerator("bf16-stochastic")
    optimizer = torch_bf16.AdamW(model.parameters(), lr=0.0, recipe="bf16-fp32-master")
    prepared, wrapped = accelerator.prepare(model, optimizer)
    train(accelerator, prepared, wrapped, batches[:1])
    assert optimizer.recipe.name == "bf16-fp32-master"
    state = optimizer.state[model.up.weight]
    assert torch.equal(join16(model.up.weight.detach(), state["remainder16"]), weight)
