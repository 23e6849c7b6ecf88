"""Training in the ways that move memory about, on the CPU and, by `pytest -m gpu`, on GPUs.

Ours, by the backend that is chosen for the device, against eager on the same device, bit for bit.
"""

import contextlib

import pytest
import torch
from gpu_marks import each_device, gpus
from optimizer_cases import assert_same, make_optimizer, parameters_of, snapshot
from torch import nn

import torch_bf16

BOTH = pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])


def on_host(optimizer):
    states = snapshot(optimizer)
    return [{key: tensor.cpu() for key, tensor in state.items()} for state in states]


def made(device, recipe, backend, adapt=lambda model: model):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return torch_bf16.prepare(adapt(model), optimizer, recipe, backend=backend)


def trained(model, optimizer, micro_batches=1, within=contextlib.nullcontext):
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for _ in range(micro_batches):
            x = torch.randn(16, 32, generator=generator).to(device, torch.bfloat16)
            model(x).float().square().mean().backward()
        with within():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return on_host(optimizer)


@each_device()
@BOTH
def test_released_gradients_have_the_bits_of_eager(device, recipe):
    results = []
    for backend in (None, "eager"):
        model, optimizer = made(device, recipe, backend)
        torch_bf16.release_gradients(model, optimizer)
        results.append(trained(model, optimizer))
    assert_same(*results)


@each_device()
@pytest.mark.parametrize("format", ["bf16_nearest", "bf16_stochastic", "fp32"])
def test_sums_of_micro_batches_have_the_bits_of_eager(device, format):
    results = []
    for backend in (None, "eager"):
        model, optimizer = made(device, "bf16-stochastic", backend)
        torch_bf16.accumulate_gradients(model, optimizer, format)
        results.append(trained(model, optimizer, micro_batches=3))
    assert_same(*results)


@each_device()
@BOTH
def test_a_step_on_another_stream_that_waited_has_the_same_bits(device, recipe):
    @contextlib.contextmanager
    def other_stream():
        if device == "cpu":
            yield
            return
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            yield
        main.wait_stream(side)

    plain = trained(*made(device, recipe, None))
    assert_same(trained(*made(device, recipe, None), within=other_stream), plain)


TWO = pytest.mark.parametrize(
    "places", [("cpu", "cpu"), pytest.param(("cuda:0", "cuda:1"), marks=gpus(2))]
)


@TWO
@BOTH
def test_a_model_that_is_not_on_the_current_device_has_the_same_bits(places, recipe):
    one, other = (trained(*made(place, recipe, None)) for place in places)
    assert_same(one, other)


def over(places, recipe, backend):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(130, 7, generator=generator).bfloat16() for _ in range(6)]
    on = [nn.Parameter(x.to(places[n % 2])) for n, x in enumerate(tensors)]
    named = [(f"p{number}", each) for number, each in enumerate(on)]
    return torch_bf16.AdamW(named, lr=0.01, recipe=recipe, backend=backend)


def give(optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in parameters_of(optimizer):
        p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)


@TWO
@BOTH
def test_one_optimizer_steps_parameters_on_two_devices(places, recipe):
    ours, eager = over(places, recipe, None), over(("cpu", "cpu"), recipe, "eager")
    for seed in range(3):
        for optimizer in (ours, eager):
            give(optimizer, seed)
            # A number on one device, for parameters on both.
            first = parameters_of(optimizer)[0].device
            optimizer.scale_next_step(torch.tensor(0.5, device=first))
            optimizer.step()
    assert_same(on_host(ours), on_host(eager))


@each_device()
def test_rows_without_gradients_stay_finite_when_their_moments_become_subnormal(device):
    results, seen = [], []
    for place, backend in ((device, None), ("cpu", "eager")):
        weight = nn.Parameter(torch.full((64, 33), 0.5).to(place, torch.bfloat16))
        optimizer = torch_bf16.AdamW(
            [("w", weight)], betas=(0.9, 0.5), recipe="bf16-fp32-master", backend=backend
        )
        for step in range(110):
            weight.grad = torch.full_like(weight, 1e-6)
            if step:
                weight.grad[::2] = 0
            optimizer.step()
            v = optimizer.state[weight]["exp_avg_sq"]
            seen.append(((v > 0) & (v < torch.finfo(torch.float32).tiny)).any())
        assert weight.isfinite().all()
        results.append(on_host(optimizer))
    assert any(seen)
    assert_same(*results)


@each_device()
@BOTH
def test_a_model_with_float8_products_trains(device, recipe):
    float8 = pytest.importorskip("torchao.float8", reason="needs torchao")
    old = device == "cuda" and torch.cuda.get_device_capability() < (8, 9)
    config = float8.Float8LinearConfig(emulate=device == "cpu" or old)

    def adapt(model):
        return float8.convert_to_float8_training(model, config=config)

    results = [trained(*made(device, recipe, backend, adapt)) for backend in (None, "eager")]
    assert_same(*results)


@pytest.mark.parametrize("recipe", ["stochastic", "master"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpus())])
def test_graphed_steps_have_the_bits_of_ordinary_ones(device, recipe):
    made = []
    for _ in range(2):
        ones = [torch.ones(64, 9 + n, dtype=torch.bfloat16, device="cuda") for n in range(3)]
        weights = {f"p{n}": nn.Parameter(each) for n, each in enumerate(ones)}
        made.append(make_optimizer("adamw", recipe, "triton", weights.items()))
    ours, plain = made
    for optimizer in made:
        give(optimizer, 0)
    step = ours.graphed()
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in made]
    for seed in range(8):
        for optimizer, take in ((ours, step), (plain, plain.step)):
            held = [p.grad for p in parameters_of(optimizer)]
            give(optimizer, seed)
            for p, gradient in zip(parameters_of(optimizer), held, strict=True):
                p.grad = gradient.copy_(p.grad)
            optimizer.scale_next_step(torch.tensor(0.5 + seed, device="cuda"))
            optimizer.skip_next_step_where(torch.tensor(float(seed == 3), device="cuda"))
            take()
            if seed % 3 == 2:
                optimizer.step()
        for each in schedules:
            each.step()
        assert_same(on_host(ours), on_host(plain))
    assert ours.skipped_steps == plain.skipped_steps == 1
