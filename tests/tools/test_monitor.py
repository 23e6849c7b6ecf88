"""The monitor tells what rounding did, and does nothing itself."""

from __future__ import annotations

import copy
import logging
import math
import pickle

import pytest
import torch
from optimizer_cases import (
    every_case,
    make_optimizer,
    make_parameters,
    parameters_of,
    set_gradients,
)

import torch_bf16
from torch_bf16 import UpdateMonitor
from torch_bf16.tools.sampling import places


def model_and_optimizer(weights, lr, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(64, 128))
    recipe = torch_bf16.get_recipe("bf16-stochastic", weights=weights)
    torch_bf16.cast_model(model, recipe)
    # SGD, whose update is known without it: lr times the gradient.
    return model, torch_bf16.SGD(model.named_parameters(), lr=lr, recipe=recipe, **options)


def take_step(model, optimizer, gradient=1.0):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()


@every_case
def test_it_changes_no_bit(name, recipe, backend):
    watched, alone = (
        make_optimizer(name, recipe, backend, make_parameters().values()) for _ in range(2)
    )
    UpdateMonitor(watched, every=1)
    for step in range(3):
        for optimizer in (watched, alone):
            set_gradients(parameters_of(optimizer), step)
            optimizer.step()
    for one, other in zip(parameters_of(watched), parameters_of(alone), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        for key, value in alone.state[other].items():
            torch.testing.assert_close(watched.state[one][key], value, rtol=0, atol=0)


@pytest.mark.parametrize("weights", ["bf16+16", "bf16+fp32"])
def test_exact_masters_let_every_update_through(weights):
    model, optimizer = model_and_optimizer(weights, lr=1e-6)
    monitor = UpdateMonitor(optimizer, every=1)
    take_step(model, optimizer)
    assert set(monitor.layers) == {"0", "1"}
    for layer in monitor.layers.values():
        assert layer.survived == 1.0
        assert layer.unmoved == 0.0
        assert layer.snr == math.inf
        # fp32 weights of about 0.1 hold 1e-6 to 2**-28.
        assert layer.update == pytest.approx(1e-6, rel=0.01)
        assert layer.lr == 1e-6


def test_rounding_to_nearest_loses_small_updates_and_is_told_so_once(caplog):
    model, optimizer = model_and_optimizer("bf16_nearest", lr=1e-6)
    monitor = UpdateMonitor(optimizer, every=1)
    with caplog.at_level(logging.WARNING, "torch_bf16"):
        for _ in range(2):
            take_step(model, optimizer)
    for layer in monitor.layers.values():
        # Only weights below 2**-11 or so move by 1e-6: one in a hundred.
        assert layer.survived < 0.03
        assert layer.unmoved > 0.97
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 2
    assert "layer 0" in warnings[0]
    assert "lost to rounding at lr 1e-06" in warnings[0]
    assert "weights='bf16+16'" in warnings[0]
    assert "(2 bytes more per parameter)" in warnings[0]


def test_stochastic_rounding_lets_updates_through_on_average():
    model, optimizer = model_and_optimizer("bf16_stochastic", lr=2e-5)
    monitor = UpdateMonitor(optimizer, every=1, sample=8192)
    seen = []
    for _ in range(20):
        take_step(model, optimizer)
        seen += [layer.survived for layer in monitor.layers.values()]
        assert all(layer.unmoved > 0.5 for layer in monitor.layers.values())
    # One element gives 1 with variance (u - d) / d at most, u = 2**-11 the largest spacing below
    # 0.0885 = 1 / sqrt(128); 20 looks at 2 x 8192 elements: a standard error of 0.0085, five taken.
    assert sum(seen) / len(seen) == pytest.approx(1, abs=5 * math.sqrt(24 / (20 * 2 * 8192)))


def test_noise_above_the_drift_is_pointed_out(caplog):
    model, optimizer = model_and_optimizer("bf16_stochastic", lr=1e-8)
    monitor = UpdateMonitor(optimizer, every=1, horizon=100)
    with caplog.at_level(logging.WARNING, "torch_bf16"):
        take_step(model, optimizer)
    for layer in monitor.layers.values():
        # sqrt(100 * 1e-8 / u), where the spacing u is 2**-11 or 2**-12 for most weights.
        assert math.sqrt(1e-6 * 2**11) < layer.snr < math.sqrt(1e-6 * 2**13)
    assert any("rounding noise" in record.message for record in caplog.records)


def test_what_exact_weights_cost_is_counted_from_the_format_there_is(caplog):
    model, optimizer = model_and_optimizer("bf16+8", lr=1e-12)
    UpdateMonitor(optimizer, every=1, horizon=100)
    with caplog.at_level(logging.WARNING, "torch_bf16"):
        take_step(model, optimizer)
    assert "(1 byte more per parameter)" in caplog.records[0].message


def test_it_looks_when_it_is_due_or_asked_and_gives_metrics_once():
    model, optimizer = model_and_optimizer("bf16_stochastic", lr=1e-3)
    monitor = UpdateMonitor(optimizer, every=3)
    taken = []
    for step in range(1, 8):
        if step == 5:
            monitor.observe_next_step()
        take_step(model, optimizer)
        taken.append(bool(monitor.take_metrics()))
    assert taken == [False, False, True, False, True, True, False]
    assert monitor.take_metrics() == {}
    names = monitor.metrics("mine")
    assert {"mine/survived/0", "mine/unmoved/1", "mine/gradient_norm"} <= set(names)
    n = sum(parameter.numel() for parameter in model.parameters())
    assert names["mine/gradient_norm"] == pytest.approx(math.sqrt(n))
    monitor.remove()
    monitor.observe_next_step()
    take_step(model, optimizer)
    assert monitor.take_metrics() == {}


def test_it_sees_the_update_that_clipping_and_maximize_leave():
    model, optimizer = model_and_optimizer("bf16+fp32", lr=0.5, maximize=True)
    monitor = UpdateMonitor(optimizer, every=1)
    before = model[0].weight.detach().float().clone()
    optimizer.scale_next_step(torch.tensor(0.25))
    take_step(model, optimizer)
    assert monitor.layers["0"].update == pytest.approx(0.125)
    assert monitor.layers["0"].survived == pytest.approx(1)
    assert (model[0].weight.detach().float() - before).mean().item() == pytest.approx(
        0.125, rel=0.01
    )


def test_a_step_with_a_gradient_that_is_not_finite_is_not_looked_at(caplog):
    model, optimizer = model_and_optimizer("bf16_nearest", lr=1e-3)
    monitor = UpdateMonitor(optimizer, every=1)
    for gradient in (math.inf, math.nan):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        torch_bf16.clip_next_step(optimizer, 1.0, skip_nonfinite=True)
        with caplog.at_level(logging.WARNING, "torch_bf16"):
            optimizer.step()
    assert optimizer.skipped_steps == 2
    assert monitor.take_metrics() == {}
    assert not caplog.records
    take_step(model, optimizer)
    assert monitor.take_metrics()["bf16/skipped_steps"] == 2


def test_copies_of_an_optimizer_are_not_watched():
    _, optimizer = model_and_optimizer("bf16_stochastic", lr=1e-3)
    UpdateMonitor(optimizer)
    assert copy.deepcopy(optimizer).observers == []
    assert pickle.loads(pickle.dumps(optimizer)).observers == []


def test_loading_a_state_dict_leaves_the_monitor_in_place():
    _, optimizer = model_and_optimizer("bf16_stochastic", lr=1e-3)
    monitor = UpdateMonitor(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.observers == [monitor]


def test_bad_arguments_are_named():
    _, optimizer = model_and_optimizer("bf16_stochastic", lr=1e-3)
    for name, value in (("every", 0), ("every", True), ("horizon", True), ("sample", 1.0)):
        with pytest.raises(ValueError, match=f"{name}={value} must be a positive int"):
            UpdateMonitor(optimizer, **{name: value})
    with pytest.raises(ValueError, match="sample=None must be a positive int"):
        UpdateMonitor(optimizer, sample=None)
    plain = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="SGD does not round by a recipe"):
        UpdateMonitor(plain)
    assert optimizer.observers == []


@pytest.mark.parametrize(
    "option", [{"lr": None}, {"lr": "fast"}, {"eps": None}, {"betas": (0.9,)}, {"grad_scale": 0.0}]
)
def test_a_step_that_cannot_be_computed_fails_with_its_own_error(option):
    said = []
    for watched in (False, True):
        parameter = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
        parameter.grad = torch.ones_like(parameter)
        optimizer = torch_bf16.AdamW([parameter])
        optimizer.step()
        if watched:
            UpdateMonitor(optimizer, every=1)
        if "grad_scale" in option:
            optimizer.grad_scale = torch.zeros(())  # pyright: ignore[reportAttributeAccessIssue]
        else:
            optimizer.param_groups[0].update(option)
        with pytest.raises(ValueError, match=r"no step can be computed|grad_scale=0\.0") as caught:
            optimizer.step()
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_a_skipped_step_lost_nothing(caplog):
    model, optimizer = model_and_optimizer("bf16+16", lr=1e-3)
    monitor = UpdateMonitor(optimizer, every=1)
    optimizer.skip_next_step_where(torch.tensor(1.0))
    take_step(model, optimizer)
    assert optimizer.skipped_steps == 1
    assert not monitor.layers
    take_step(model, optimizer)
    assert all(layer.survived == 1.0 for layer in monitor.layers.values())
    assert not caplog.records


def test_a_step_that_was_broken_off_is_not_seen_in_a_later_one():
    class Breaking:
        on = True

        def before_update(self, members, inputs):
            if self.on:
                raise KeyboardInterrupt

        def after_update(self):
            pass

    model, optimizer = model_and_optimizer("bf16+16", lr=1e-3)
    monitor = UpdateMonitor(optimizer, every=2)
    breaking = Breaking()
    breaking.on = False
    optimizer.observers.append(breaking)
    take_step(model, optimizer)
    breaking.on = True
    with pytest.raises(KeyboardInterrupt):
        take_step(model, optimizer)
    breaking.on = False
    take_step(model, optimizer)
    assert not monitor.layers


def test_a_bias_that_moves_does_not_hide_a_matrix_that_does_not(caplog):
    torch.manual_seed(0)
    model = torch_bf16.cast_model(torch.nn.Sequential(torch.nn.Linear(64, 64)), "bf16-stochastic")
    groups = [
        {"params": [("0.bias", model[0].bias)], "lr": 1e-3},
        {"params": [("0.weight", model[0].weight)], "lr": 1e-8},
    ]
    optimizer = torch_bf16.SGD(groups, lr=1.0, recipe="bf16-stochastic")
    UpdateMonitor(optimizer, every=1)
    with caplog.at_level(logging.WARNING, logger="torch_bf16"):
        take_step(model, optimizer)
    (record,) = caplog.records
    assert "rounding noise is" in record.getMessage()
    assert "at lr 1e-08" in record.getMessage()


@pytest.mark.parametrize("numel", [5000, 2**30 + 448, 2**31 + 3 * 2**20 + 64])
def test_a_sample_s_places_lie_in_the_tensor(numel):
    found = places(numel, 4096, torch.device("cpu"))
    assert len(found) <= 4096
    assert found.min() == 0
    assert numel - 128 <= found.max() < numel
    assert (found.diff() > 0).all()
