"""Gradients of complex parameters: norms, clipping, sums of micro-batches, and release."""

import pytest
import torch
from complex_cases import (
    Waves,
    assert_like_twin,
    conjugated,
    give,
    make_pair,
    random_gradients,
    real,
)
from complex_replica import run

import torch_bf16
from torch_bf16.plugin_api import parameters_of


@pytest.mark.parametrize("form", [torch.clone, conjugated], ids=["plain", "conjugated"])
def test_the_norm_is_that_of_the_real_twins_and_clips_the_step_like_theirs(form):
    pair = make_pair("adamw", "stochastic", "cpu")
    give(pair, random_gradients(pair[0], 0), form)
    norms = [torch_bf16.clip_next_step(each, 1.0) for each in pair]
    exact = sum(real(p.grad).double().square().sum() for p in parameters_of(pair[1])).sqrt()
    assert torch.equal(*norms)
    assert float(norms[0]) == pytest.approx(float(exact), rel=1e-6)
    for each in pair:
        each.step()
    assert_like_twin(*pair)


@pytest.mark.parametrize("form", [torch.clone, conjugated], ids=["plain", "conjugated"])
def test_gradients_are_clipped_in_place_like_those_of_the_real_twins(form):
    pair = make_pair("sgd", "master", "cpu")
    give(pair, random_gradients(pair[0], 0), form)
    for each in pair:
        torch_bf16.clip_grad_norm_(parameters_of(each), 1.0)
    for p, other in zip(*map(parameters_of, pair), strict=True):
        assert torch.allclose(real(p.grad), other.grad, rtol=1e-6)
    assert float(torch_bf16.total_norm(parameters_of(pair[0]))) == pytest.approx(1.0, rel=2**-7)


def train(real_twin, mode, micro_batches=1, cls=torch.optim.AdamW, release=False, **options):
    recipe = torch_bf16.get_recipe(mode, **options)
    if real_twin:
        recipe = torch_bf16.get_recipe(recipe, keep_fp32=("wave", "gain"))
    model = Waves(real_twin)
    model, optimizer = torch_bf16.prepare(model, cls(model.parameters(), lr=0.01), recipe)
    if release:
        torch_bf16.release_gradients(model, optimizer, accumulation_steps=micro_batches)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for _ in range(micro_batches):
            with torch.autocast("cpu", torch.bfloat16):
                y = model(torch.randn(4, 8, generator=generator))
            y.float().square().mean().backward()
        if not release:
            kinds = {p.dtype: p.grad.dtype for p in model.parameters()}
            assert real_twin or kinds[torch.complex64] == torch.complex64
        optimizer.step()
        optimizer.zero_grad()
    return [real(p) for p in model.parameters()]


@pytest.mark.parametrize("accumulate", ["bf16_nearest", "bf16_stochastic", "fp32"])
@pytest.mark.parametrize("mode", ["bf16-stochastic", "bf16-fp32-master"])
def test_sums_of_micro_batches_are_those_of_the_real_twins(mode, accumulate):
    weights = [train(twin, mode, 3, accumulate=accumulate) for twin in (False, True)]
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_released_gradients_step_complex_parameters_as_ordinary_ones_do(micro_batches):
    released = train(False, "bf16-stochastic", micro_batches, release=True)
    assert all(map(torch.equal, released, train(False, "bf16-stochastic", micro_batches)))


@pytest.mark.skipif(torch.__version__ < "2.8", reason="torch 2.7's DDP refuses complex parameters")
def test_two_ranks_reduce_complex_gradients_as_ddp_does_those_of_the_real_twins(ranks):
    ranks(2, run)
