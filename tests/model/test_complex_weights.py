"""Complex weights beside bf16 ones: averages, exact weights, bytes, estimates and the monitor."""

import copy

import pytest
import torch
from complex_cases import Waves, real

import torch_bf16
from torch_bf16.tools.estimate.memory import dtype_of
from torch_bf16.tools.estimate.precisions import precisions
from torch_bf16.tools.estimate.shapes import shapes_of
from torch_bf16.tools.estimate.sources import model_shapes


def prepared(mode="bf16-stochastic"):
    model = Waves()
    return torch_bf16.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), mode)


def step(model, optimizer, seed=0):
    torch.manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()


@pytest.mark.parametrize("format", ["fp32", "bf16_stochastic", None])
def test_an_average_of_complex_weights_is_complex_in_every_format(format):
    model, optimizer = prepared()
    ema = torch_bf16.EMA(model, decay=0.75, format=format)
    ema.update_parameters(model)
    first = model.wave.detach().clone()
    step(model, optimizer)
    ema.update_parameters(model)
    assert ema.module.wave.dtype == torch.complex64
    assert torch.allclose(ema.module.wave, first + (model.wave - first) * 0.25, rtol=1e-5)
    trained = model.wave.detach().clone()
    with ema.swapped(model):
        assert torch.equal(model.wave, ema.module.wave)
    assert torch.equal(model.wave, trained)


def test_exact_weights_of_complex_parameters_are_read_and_written_as_complex_numbers():
    model, optimizer = prepared("bf16-fp32-master")
    step(model, optimizer)
    with torch_bf16.exact_weights(model, optimizer) as weights:
        assert torch.equal(weights["wave"], model.wave)
        weights["wave"] = weights["wave"] * 2j
        doubled = weights["wave"].clone()
    assert torch.equal(model.wave, doubled)
    match = r"given torch.float32 .* it takes complex64 of the parameter's shape"
    with pytest.raises(ValueError, match=match):
        optimizer.set_exact_weight(model.wave, doubled.real.contiguous())


@pytest.mark.parametrize("accumulate", ["bf16_nearest", "fp32"])
def test_a_complex_number_counts_as_two_numbers_of_fp32(accumulate):
    recipe = torch_bf16.get_recipe("bf16-stochastic", accumulate=accumulate)
    alone = torch.nn.Module()
    alone.wave = torch.nn.Parameter(torch.ones(3, 5, dtype=torch.complex64))
    found = torch_bf16.describe(alone, recipe)
    assert (found.parameters, found.trained) == ({"complex64": 30}, 30)
    assert found.bytes_by_role == dict.fromkeys(found.bytes_by_role, 4.0)
    assert len(found.bytes_by_role) == 4


def test_estimates_count_complex_weights_in_fp32_in_every_precision(tmp_path):
    (wave, *_) = (each for each in shapes_of(Waves(), "it").weights if each.name == "wave")
    assert (wave.shape, wave.numel, wave.hidden) == ((5, 6, 2), 60, False)
    torch.save(Waves().state_dict(), tmp_path / "run.pt")
    (saved, *_) = (e for e in model_shapes(f"{tmp_path}/run.pt").weights if e.name == "wave")
    assert saved.shape == (5, 6, 2)
    for each in (wave, saved):
        assert {dtype_of(each, precision) for precision in precisions()} == {torch.float32}


def test_the_monitor_sees_that_complex_weights_lose_nothing():
    model, optimizer = prepared()
    monitor = torch_bf16.UpdateMonitor(optimizer, every=1)
    for seed in range(2):
        step(model, optimizer, seed)
    assert monitor.layers["wave"].survived == pytest.approx(1.0, abs=1e-4)
    assert monitor.layers["wave"].unmoved == 0
    assert monitor.layers["wave"].update > 0


def test_a_warning_that_nothing_was_cast_overlooks_complex_parameters(caplog):
    model = Waves()
    optimizer = torch_bf16.AdamW(model.parameters())
    step(model, optimizer)
    assert "trains float32 parameters only" in caplog.text
    caplog.clear()
    step(model, torch_bf16.AdamW([model.wave]))
    assert not caplog.text


def test_a_copy_of_a_model_and_its_optimizer_trains_on_to_the_bit():
    model, optimizer = prepared()
    step(model, optimizer)
    twin, own = copy.deepcopy((model, optimizer))
    for each in ((model, optimizer), (twin, own)):
        step(*each, 1)
    assert all(map(torch.equal, map(real, model.parameters()), map(real, twin.parameters())))
