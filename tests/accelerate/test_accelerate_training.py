"""Training through prepare, in one process."""

from __future__ import annotations

import copy
import itertools
import logging

import pytest
import torch
from accelerate.utils import AutocastKwargs
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import torch_bf16
from accelerate_bf16.proof import announce
from torch_bf16 import BF16Optimizer


def train(accelerator, model, optimizer, batches, scheduler=None):
    losses = []
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_one_process_trains_in_bf16_and_keeps_identities(make_accelerator, mode, model, batches):
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
    assert optimizer.state[model.norm.weight]["remainder"].dtype == torch.int16


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


def test_every_order_of_arguments_gives_the_same_training(make_accelerator, model, batches):
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
    make_accelerator, mode, model, batches, first
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
    assert "remainder" in optimizer.state[model.norm.weight]


@pytest.mark.parametrize("before", [True, False], ids=["before-prepare", "after-prepare"])
@pytest.mark.parametrize("passed", [True, False], ids=["passed", "own"])
def test_schedulers_of_any_age_move_the_rate_of_our_step(
    make_accelerator, recwarn, model, batches, before, passed
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
    x = batches[0][0]
    for _ in range(3):
        for each, optimizer in zip((one, other), optimizers, strict=True):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not torch.equal(one.weight, other.weight)
    assert torch.allclose(one.weight.float(), other.weight.float(), atol=1e-2)


def test_accumulation_steps_once_per_window(make_accelerator, mode, model, batches):
    accelerator = make_accelerator(mode, gradient_accumulation_steps=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    losses = train(accelerator, prepared, wrapped, batches[:32])
    assert optimizer.state[model.up.weight]["step"] == 8
    assert losses[-1] < losses[0]


def test_clipping_by_norm_limits_the_gradients(make_accelerator, mode, model, batches):
    accelerator = make_accelerator(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    x, y = batches[0]
    accelerator.backward(100 * mse_loss(prepared(x), y))
    expected = torch_bf16.total_norm(model.parameters())
    norm = accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
    assert float(norm) == pytest.approx(float(expected), rel=2**-7)
    assert float(torch_bf16.total_norm(model.parameters())) == pytest.approx(0.5, rel=2**-6)
    wrapped.step()


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
    from torch_bf16.rounding import join16

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
    assert torch.equal(join16(model.up.weight.detach(), state["remainder"]), weight)
    assert state["step"] == 3


def test_accelerators_round_trip_at_prepare_changes_no_bit(make_accelerator, mode, model, batches):
    accelerator = make_accelerator(mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    train(accelerator, prepared, wrapped, batches[:3])
    before = {k: v.clone() for k, v in optimizer.state[model.up.weight].items()}
    another = make_accelerator(mode)
    another.prepare_optimizer(optimizer)
    after = optimizer.state[model.up.weight]
    assert {k: v.dtype for k, v in after.items()} == {k: v.dtype for k, v in before.items()}
    assert all(torch.equal(after[k], v) for k, v in before.items())


def test_preparing_again_changes_nothing(make_accelerator, mode, model, batches):
    accelerator = make_accelerator(mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    forward = model.forward
    again, wrapped_again = accelerator.prepare(prepared, wrapped)
    assert again is prepared
    assert wrapped_again is wrapped
    assert model.forward == forward
    train(accelerator, again, wrapped_again, batches[:3])


def test_preparing_the_module_below_ddp_again_wraps_forward_once(make_accelerator, mode, model):
    accelerator = make_accelerator(mode)
    accelerator.prepare(model)
    forward = model.forward
    # Under DDP it is the wrapper that carries this mark.
    del model._is_accelerate_prepared
    accelerator.prepare(model)
    assert model.forward == forward


def test_two_accelerators_in_one_process(make_accelerator, mode, batches):
    for _ in range(2):
        accelerator = make_accelerator(mode)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        prepared, wrapped = accelerator.prepare(model, optimizer)
        train(accelerator, prepared, wrapped, batches[:3])
        assert model.weight.dtype == torch.bfloat16


def test_an_optimizer_of_ours_keeps_the_users_recipe(make_accelerator, model, batches):
    from torch_bf16.rounding import join16

    weight = model.up.weight.detach().clone()
    accelerator = make_accelerator("bf16-stochastic")
    optimizer = torch_bf16.AdamW(model.parameters(), lr=0.0, recipe="bf16-fp32-master")
    prepared, wrapped = accelerator.prepare(model, optimizer)
    train(accelerator, prepared, wrapped, batches[:1])
    assert optimizer.recipe.name == "bf16-fp32-master"
    state = optimizer.state[model.up.weight]
    assert torch.equal(join16(model.up.weight.detach(), state["remainder"]), weight)


@pytest.mark.parametrize(
    ("make", "name"),
    [(torch.optim.LBFGS, "torch.optim.lbfgs.LBFGS"), (torch.optim.Adafactor, "Adafactor")],
    ids=["lbfgs", "adafactor"],
)
def test_optimizer_that_cannot_be_converted_raises_and_leaves_all_usable(
    make_accelerator, model, batches, make, name
):
    accelerator = make_accelerator("bf16-stochastic")
    optimizer = make(model.parameters())
    with pytest.raises(NotImplementedError, match=f"{name} cannot be converted: .* Use one of"):
        accelerator.prepare(model, optimizer)
    assert model.up.weight.dtype == torch.float32
    assert type(optimizer) is make
    assert accelerator.mixed_precision == "bf16-stochastic"

    good = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, wrapped = accelerator.prepare(model, good)
    train(accelerator, prepared, wrapped, batches[:3])


def test_evaluation_without_an_optimizer(make_accelerator, mode, model, batches):
    accelerator = make_accelerator(mode)
    prepared = accelerator.prepare_model(model.eval(), evaluation_mode=True)
    with torch.no_grad():
        output = prepared(batches[0][0])
    assert output.dtype == torch.float32
    assert model.up.weight.dtype == torch.bfloat16


def test_autocast_context_runs_modules_outside_forward(make_accelerator, mode, model, batches):
    accelerator = make_accelerator(mode)
    accelerator.prepare(model)
    x = batches[0][0]
    with pytest.raises(RuntimeError, match="same dtype"):
        model.up(x)
    with accelerator.autocast():
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_cache_enabled()
        assert model.up(x).dtype == torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()


def test_unwrap_gives_back_the_users_forward(make_accelerator, mode, batches):
    class Decorated(nn.Linear):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    accelerator = make_accelerator(mode)
    model = Decorated(8, 1)
    prepared = accelerator.prepare(model)
    assert prepared(batches[0][0]).dtype == torch.float32
    assert accelerator.unwrap_model(prepared) is model
    bare = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert bare.forward.__func__ is Decorated.forward
    output = bare(batches[0][0].bfloat16())
    assert output.dtype == torch.bfloat16
    assert not output.requires_grad


def test_state_dict_for_saving_is_bf16_and_loads_into_a_plain_model(
    make_accelerator, mode, model, tmp_path
):
    accelerator = make_accelerator(mode)
    prepared = accelerator.prepare(model)
    state = accelerator.get_state_dict(prepared)
    assert state["up.weight"].dtype == torch.bfloat16
    torch.save(state, tmp_path / "model.pt")
    plain = type(model)()
    plain.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(plain.up.weight, model.up.weight.float())


def test_wrapped_and_half_precision_models_are_refused_untouched(make_accelerator, mode):
    accelerator = make_accelerator(mode)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with pytest.raises(ValueError, match=r"parameter '1.weight' .* is torch.float16"):
        accelerator.prepare(model)
    assert model[0].weight.dtype == torch.float32
    assert accelerator.mixed_precision == mode


def test_one_line_of_proof_is_visible_by_default(make_accelerator, mode, model, caplog):
    accelerator = make_accelerator(mode)
    optimizer = torch.optim.AdamW(model.parameters())
    prepared, wrapped = accelerator.prepare(model, optimizer)
    accelerator.prepare(prepared, wrapped)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"mixed_precision={mode}: {optimizer.recipe.name}: ")
    assert "bytes per trained parameter" in line


def test_accelerate_sees_no_mixed_precision_while_it_prepares(make_accelerator, mode):
    # Its FSDP branches would cast bf16 weights back to fp32 otherwise.
    seen = []
    accelerator = make_accelerator(mode)

    class Spy(nn.Linear):
        def to(self, *args, **kwargs):
            seen.append(accelerator.mixed_precision)
            if len(seen) > 1:
                raise RuntimeError("cannot move")
            return super().to(*args, **kwargs)

    accelerator.prepare(Spy(2, 2))
    with pytest.raises(RuntimeError, match="cannot move"):
        accelerator.prepare(Spy(2, 2))
    assert seen == ["no", "no"]
    assert accelerator.mixed_precision == mode


def test_an_optimizer_without_a_prepared_model_is_said_to_be_one(make_accelerator, model, caplog):
    accelerator = make_accelerator("bf16-stochastic")
    accelerator.prepare(torch.optim.AdamW(model.parameters()))
    accelerator.prepare(model)
    first, second = [record.getMessage() for record in caplog.records]
    assert "AdamW holds parameters of no prepared model; they become bf16 when" in first
    assert "497 parameters (465 bfloat16, 32 float32)" in second


def test_modules_without_parameters_are_not_worth_a_line(make_accelerator, mode, caplog):
    make_accelerator(mode).prepare(nn.MSELoss())
    assert not caplog.records


def test_proof_goes_to_stderr_where_logging_is_not_configured(monkeypatch, capsys):
    logger = logging.getLogger("accelerate_bf16")
    monkeypatch.setattr(logger, "propagate", False)
    announce("one line")
    assert capsys.readouterr().err == "one line\n"
    monkeypatch.setattr(logger, "level", logging.WARNING)
    logger.manager._clear_cache()
    announce("not shown")
    assert not capsys.readouterr().err
    logger.manager._clear_cache()


@pytest.mark.parametrize("value", ["no", "bf16"])
def test_accelerates_own_modes_are_left_alone(make_accelerator, model, batches, value, caplog):
    accelerator = make_accelerator(value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    train(accelerator, prepared, wrapped, batches[:2])
    assert type(optimizer) is torch.optim.AdamW
    assert model.up.weight.dtype == torch.float32
    assert not caplog.records
