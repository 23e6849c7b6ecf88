"""Accelerator.clip_grad_norm_: an fp32 norm, and one pass over the gradients."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import torch_bf16


@pytest.fixture
def prepared(make_accelerator, mode, model, batches):
    """An accelerator, a model with large gradients, and its optimizer."""
    accelerator = make_accelerator(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    _, wrapped = accelerator.prepare(model, optimizer)
    x, y = batches[0]
    accelerator.backward(100 * mse_loss(model(x), y))
    return accelerator, model, wrapped


@pytest.mark.parametrize("limit", [5.0, 1e6], ids=["clipped", "below-the-limit"])
def test_the_norm_is_fp32_and_the_step_takes_the_coefficient(prepared, limit):
    accelerator, model, wrapped = prepared
    exact = float(sum(p.grad.double().square().sum() for p in model.parameters()).sqrt())
    assert exact > 10.0
    gradients = [p.grad.clone() for p in model.parameters()]
    weights = [p.detach().double() for p in model.parameters()]
    norm = accelerator.clip_grad_norm_(model.parameters(), limit)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(exact, rel=1e-6)
    left = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
    assert float(left) == pytest.approx(min(exact, limit), rel=1e-6)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    wrapped.step()
    pairs = zip(model.parameters(), weights, strict=True)
    moved = float(sum((p.detach().double() - w).square().sum() for p, w in pairs).sqrt())
    # The visible bf16 weights are rounded.
    assert moved == pytest.approx(1e-2 * min(exact, limit), rel=0.1)


def test_a_part_of_the_parameters_is_scaled_in_place(prepared):
    accelerator, model, _ = prepared
    others = [p.grad.clone() for p in model.down.parameters()]
    for part in (model.up.weight, model.up.parameters()):  # one alone, as torch takes it, too
        norm = accelerator.clip_grad_norm_(part, 0.5)
        assert float(norm) > 0.5
    assert float(torch_bf16.total_norm(model.up.parameters())) == pytest.approx(0.5, rel=2**-7)
    pairs = zip(model.down.parameters(), others, strict=True)
    assert all(torch.equal(p.grad, g) for p, g in pairs)


def test_two_optimizers_share_the_coefficient_of_all_their_gradients(make_accelerator, mode):
    accelerator = make_accelerator(mode)
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in model]
    accelerator.prepare(model, *optimizers)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert float(norm) == 12.0
    weights = [part.bias.detach().float() for part in model]
    for optimizer in optimizers:
        optimizer.step()
    for part, weight in zip(model, weights, strict=True):
        assert torch.allclose(weight - part.bias.float(), torch.tensor(1 / 12), rtol=0.05)


def test_gradients_that_replaced_the_clipped_ones_are_not_scaled(prepared):
    accelerator, model, wrapped = prepared
    accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    model.zero_grad()
    before = model.up.bias.detach().float()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 50.0)
    with pytest.warns(UserWarning, match="clipped and then replaced or written before"):
        wrapped.step()
    assert torch.allclose(before - model.up.bias.float(), torch.tensor(0.5), rtol=0.1)


def by_value(accelerator, parameters):
    accelerator.clip_grad_value_(parameters, 0.02)
    return lambda g: g.clamp(-0.02, 0.02)


def by_another_norm(accelerator, parameters):
    # Above it only if the clip before is forgotten.
    accelerator.clip_grad_norm_(parameters, 50.0, norm_type=1)
    return lambda g: g


@pytest.mark.parametrize("clip", [by_value, by_another_norm])
def test_another_clip_comes_on_top_of_the_one_by_the_norm(prepared, clip):
    accelerator, model, wrapped = prepared
    parameters = [*model.parameters()]
    gradients = [p.grad.double() for p in parameters]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    assert sum(float(g.abs().sum()) for g in gradients) > 50.0
    accelerator.clip_grad_norm_(parameters, 1.0)
    clipped = clip(accelerator, parameters)
    torch_bf16.scale_gradients(wrapped)
    found = [p.grad.double() for p in parameters]
    for g, now in zip(gradients, found, strict=True):
        torch.testing.assert_close(now, clipped(g / norm), rtol=2**-7, atol=1e-9)
    weights = [p.detach().double() for p in parameters]
    wrapped.param_groups[0]["lr"] = 10.0
    wrapped.step()
    for p, weight, now in zip(parameters, weights, found, strict=True):
        moved = (p.detach().double() - weight + 10.0 * now).norm()
        assert moved < 0.1 * (10.0 * now).norm() + 0.01


def test_a_part_of_a_sum_leaves_no_coefficient_behind(make_accelerator, mode):
    accelerator = make_accelerator(mode, gradient_accumulation_steps=2)
    model = nn.Linear(4, 4)
    _, wrapped = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.bias.detach().float()
    norms, warned = [], []
    # The second part takes back nearly all of the first, whose norm is above the limit.
    for value in (1.0, -0.875):
        with accelerator.accumulate(model):
            for p in model.parameters():
                p.grad = torch.full_like(p, value) if p.grad is None else p.grad.add_(value)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                norms += [float(accelerator.clip_grad_norm_(model.parameters(), 1.0))]
                norms += [float(accelerator.clip_grad_norm_(model.parameters(), 1.0))]
            warned += [(each.filename, str(each.message)) for each in caught]
            wrapped.step()
            wrapped.zero_grad()
    assert norms == [pytest.approx(20**0.5 * value) for value in (1.0, 1.0, 0.125, 0.125)]
    ((file, message),) = warned
    assert file == __file__
    assert "Call it only if accelerator.sync_gradients, which clips the whole sum" in message
    assert torch.allclose(before - model.bias.float(), torch.tensor(0.125), rtol=0.05)


@pytest.mark.parametrize("norm_type", [1, float("inf")])
def test_other_norms_are_accelerates_own(prepared, norm_type):
    accelerator, model, _ = prepared
    accelerator.clip_grad_norm_(model.parameters(), 0.5, norm_type=norm_type)
    clipped = nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)
    assert float(clipped) == pytest.approx(0.5, rel=2**-6)


def test_a_generator_of_parameters_without_gradients_has_norm_zero(make_accelerator, mode):
    accelerator = make_accelerator(mode)
    assert float(accelerator.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)) == 0.0
