"""A cast module runs under autocast wherever the uncast one does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torch_bf16 import cast_model, torch_patches
from torch_bf16.model import autocast

MODULES = {
    "layer_norm": (nn.LayerNorm(8), (4, 8)),
    "layer_norm-no-bias": (nn.LayerNorm(8, bias=False), (4, 8)),
    "rms_norm": (nn.RMSNorm(8), (4, 8)),
    "group_norm": (nn.GroupNorm(2, 8), (4, 8, 3)),
    "instance_norm": (nn.InstanceNorm1d(8, affine=True), (4, 8, 3)),
}


@pytest.mark.parametrize("name", MODULES)
def test_norm_of_fp32_activations_equals_the_norm_with_widened_weights(name):
    original, shape = MODULES[name]
    module = cast_model(copy.deepcopy(original))
    widened = copy.deepcopy(module).float()
    x = torch.randn(shape, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = module(x)
    expected = widened(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, expected)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(expected.square().sum(), x)[0])
    y = module(x.detach().bfloat16())
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bilinear_takes_either_dtype(dtype):
    module = cast_model(nn.Bilinear(8, 8, 3))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = module(torch.randn(4, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype))
    assert y.dtype == dtype
    y.sum().backward()
    assert module.weight.grad.dtype == torch.bfloat16


FP32_ONLY = {
    "matrix_exp": torch.matrix_exp,
    "det": torch.linalg.det,
    "logdet": torch.logdet,
    "slogdet": lambda w: torch.linalg.slogdet(w)[1],
    "pinv": torch.linalg.pinv,
    "pinv of a rank": lambda w: torch.linalg.pinv(w, rtol=1e-3),
    "lu": lambda w: torch.linalg.lu(w)[2],
    "lu_factor": lambda w: torch.linalg.lu_factor(w)[0],
    "solve_ex": lambda w: torch.linalg.solve_ex(w, torch.ones(8, 2))[0],
    "vander": lambda w: torch.linalg.vander(w[0], N=3),
    "pdist": nn.functional.pdist,
    "ndtri": lambda w: torch.special.ndtri(w.abs() / 4),
    "log_ndtr": torch.special.log_ndtr,
}


@pytest.mark.parametrize("function", FP32_ONLY.values(), ids=FP32_ONLY)
def test_what_has_no_sound_bf16_kernel_is_computed_in_fp32(function):
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(8) + 0.1 * torch.randn(8, 8, generator=generator))
    cast_model(layer)
    widened = layer.weight.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = function(layer.weight)
    expected = function(widened)
    assert y.dtype == torch.float32
    assert torch.equal(y, expected)
    y.sum().backward()
    expected.sum().backward()
    assert torch.equal(layer.weight.grad, widened.grad.bfloat16())


def test_a_gamma_distribution_with_learned_parameters_is_sampled_in_fp32():
    layer = cast_model(nn.Linear(8, 8))
    concentration = 1.0 + layer.weight.square()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        draws = torch.distributions.Gamma(concentration, torch.ones(8)).rsample()
    assert draws.dtype == torch.float32
    draws.sum().backward()
    assert layer.weight.grad.isfinite().all()
    assert layer.weight.grad.any()


@pytest.mark.parametrize("channels", [1, 8], ids=["per tensor", "per channel"])
def test_a_learned_quantisation_step_meets_its_zero_point_in_fp32(channels):
    layer = nn.Linear(8, 8, bias=False)
    layer.register_parameter("step", nn.Parameter(torch.full((channels,), 0.02)))
    cast_model(layer)
    zero_point = torch.zeros(channels)

    def quantised(weight, step):
        options = (0,) if channels > 1 else ()
        where = "channel" if channels > 1 else "tensor"
        function = getattr(torch, f"_fake_quantize_learnable_per_{where}_affine")
        return function(weight, step, zero_point, *options, -128, 127, 1.0)

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = quantised(layer.weight, layer.step)
    expected = quantised(layer.weight.detach().float(), layer.step.detach().float())
    assert torch.equal(y, expected)
    y.square().sum().backward()
    assert layer.weight.grad.any()
    assert layer.step.grad.any()


def test_fake_quantisation_per_channel_rounds_to_the_levels_of_fp32():
    layer = cast_model(nn.Linear(64, 8, bias=False))
    scale = layer.weight.detach().float().abs().amax(1) / 127

    def quantised(weight):
        zero_point = torch.zeros(8, dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(weight, scale, zero_point, 0, -128, 127)

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = quantised(layer.weight)
    assert torch.equal(y, quantised(layer.weight.detach().float()))
    y.square().sum().backward()
    assert layer.weight.grad.any()


def test_fake_quantisation_fused_with_its_observer_takes_bf16_weights():
    layer = cast_model(nn.Linear(8, 8, bias=False))

    def quantised(weight):
        on, low, high = torch.ones(1, dtype=torch.long), torch.zeros(1), torch.zeros(1)
        scale, zero_point = torch.ones(1), torch.zeros(1, dtype=torch.int32)
        options = (0.01, -128, 127, 0, False, True)
        y = torch.fused_moving_avg_obs_fake_quant(
            weight, on, on, low, high, scale, zero_point, *options
        )
        return y, high

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y, high = quantised(layer.weight)
    expected, expected_high = quantised(layer.weight.detach().float())
    assert torch.equal(y, expected)
    assert torch.equal(high, expected_high)
    y.square().sum().backward()
    assert layer.weight.grad.any()


def test_an_orthogonal_weight_stays_orthogonal_in_a_cast_model():
    torch.manual_seed(0)
    layer = cast_model(nn.utils.parametrizations.orthogonal(nn.Linear(16, 16)))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        weight = layer.weight
        layer(torch.randn(4, 16)).float().square().sum().backward()
    assert (weight.float() @ weight.float().T - torch.eye(16)).abs().max() < 0.05
    assert layer.parametrizations.weight.original.grad.isfinite().all()


def test_outside_autocast_nothing_is_widened():
    module = cast_model(nn.LayerNorm(8))
    with pytest.raises(RuntimeError, match="mixed dtype"):
        module(torch.randn(4, 8))


def kernels(key):
    names = [each for gaps in autocast.GAPS[key].values() for each in gaps]
    operators = [each.name() for name in names for each in autocast.overloads(name)]
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in operators if known(name, key)]


def test_what_is_registered_for_the_process_can_be_undone():
    torch_patches.restore()
    stock = {key: kernels(key) for key in autocast.GAPS}
    module = nn.LayerNorm(8, dtype=torch.bfloat16)
    for _ in range(2):
        cast_model(nn.Linear(2, 2))
        assert all(len(kernels(key)) > len(known) for key, known in stock.items())
        with torch.autocast("cpu", torch.bfloat16):
            assert module(torch.randn(4, 8)).dtype == torch.float32
        torch_patches.restore()
        assert {key: kernels(key) for key in autocast.GAPS} == stock
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(RuntimeError, match="mixed dtype"),
        ):
            module(torch.randn(4, 8))
    autocast.fill_gaps()


def test_both_devices_have_the_same_gaps_filled_but_for_what_torch_does_itself():
    cast_model(nn.Linear(2, 2))
    on_cpu, on_gpu = ({*kernels(key)} for key in autocast.GAPS)
    assert not on_gpu - on_cpu
    names = {name.split("::")[1].split(".")[0] for name in on_cpu - on_gpu}
    assert names == {*autocast._NORMS, *autocast._FP32_ONLY_ON_CPUS, "lstm"}
