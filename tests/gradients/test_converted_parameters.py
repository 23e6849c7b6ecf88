"""Models that are converted while their gradients are summed in a format, or released."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import torch_bf16
from torch_bf16 import Recipe

STOCHASTIC = {"recipe": Recipe("own", accumulate="bf16_stochastic")}
RELEASED = {"release": {"max_norm": None}}
FP32 = pytest.param({"recipe": Recipe("own", accumulate="fp32")}, id="fp32")
BOTH = [pytest.param(STOCHASTIC, id="stochastic"), pytest.param(RELEASED, id="released")]


def sharded(mesh, options):
    torch.manual_seed(0)
    model = torch_bf16.cast_model(nn.Linear(4, 4, bias=False))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    return model, torch_bf16.SGD(model.parameters(), lr=0.1, **options)


def train(model, optimizer, passes):
    generator = torch.Generator().manual_seed(0)
    for _ in range(passes):
        x = torch.randn(8, 4, generator=generator).bfloat16()
        model(x).float().square().mean().backward()
    gradients = [p.grad if p.grad is None else p.grad.full_tensor() for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return gradients + [p.full_tensor().clone() for p in model.parameters()]


@pytest.mark.parametrize("options", BOTH)
def test_under_fsdp2_a_conversion_changes_nothing_in_later_steps(one_rank, options):
    passes = 1 if options is RELEASED else 3
    plain, converted = sharded(one_rank, options), sharded(one_rank, options)
    for _ in range(2):
        expected, found = train(*plain, passes), train(*converted, passes)
        assert all(
            a is b is None or torch.equal(a, b) for a, b in zip(expected, found, strict=True)
        )
        converted[0].to("cpu")
    assert {p.dtype for p in converted[0].float().parameters()} == {torch.float32}


@pytest.mark.parametrize("options", [*BOTH, FP32])
def test_a_conversion_that_would_lose_hooks_is_refused_until_they_are_removed(one_rank, options):
    model = torch_bf16.cast_model(nn.Linear(4, 4, bias=False))
    parallelize_module(model, one_rank, ColwiseParallel())
    optimizer = torch_bf16.SGD(model.parameters(), lr=0.1, **options)
    with pytest.raises(RuntimeError, match="Couldn't swap"):
        model.float()
    released = options is RELEASED
    call = torch_bf16.release_gradients if released else torch_bf16.accumulate_gradients
    call(model, optimizer).remove()
    assert model.float().weight.dtype == torch.float32


@pytest.mark.parametrize("options", [FP32])
def test_a_conversion_that_would_lose_the_dtype_of_sums_is_refused(one_rank, options):
    model, optimizer = sharded(one_rank, options)
    with pytest.raises(RuntimeError, match="Couldn't swap"):
        model.to("cpu")
    torch_bf16.accumulate_gradients(model, optimizer).remove()
    assert model.float().weight.dtype == torch.float32


@pytest.mark.parametrize("options", [STOCHASTIC])
def test_weights_that_became_fp32_have_the_sums_of_torch(options):
    torch.manual_seed(0)
    model = torch_bf16.cast_model(nn.Linear(4, 4))
    optimizer = torch_bf16.SGD(model.parameters(), lr=0.1, **options)
    model.float()
    plain = copy.deepcopy(model)
    for x in torch.randn(3, 8, 4):
        for each in (model, plain):
            each(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    optimizer.step()
