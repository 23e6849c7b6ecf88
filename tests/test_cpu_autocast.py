"""A cast module runs under CPU autocast wherever the uncast one does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torch_bf16 import cast_module

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
    module = cast_module(copy.deepcopy(original))
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
    module = cast_module(nn.Bilinear(8, 8, 3))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = module(torch.randn(4, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype))
    assert y.dtype == dtype
    y.sum().backward()
    assert module.weight.grad.dtype == torch.bfloat16


def test_outside_autocast_nothing_is_widened():
    module = cast_module(nn.LayerNorm(8))
    with pytest.raises(RuntimeError, match="mixed dtype"):
        module(torch.randn(4, 8))
