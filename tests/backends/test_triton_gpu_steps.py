"""Whole optimizers with the Triton backend on a GPU: `pytest -m gpu`."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from gpu_marks import gpus, sanitize
from optimizer_cases import (
    assert_same,
    make_optimizer,
    make_parameters,
    parameters_of,
    snapshot,
)

import torch_bf16
from torch_bf16.tools.selftest.steps import waiting_is_an_error

pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")

pytestmark = gpus()
HERE = str(Path(__file__).parent)
SUPPORT = str(Path(__file__).parents[1] / "support")
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


def on_gpu():
    return {n: torch.nn.Parameter(p.detach().cuda()) for n, p in make_parameters().items()}.items()


def same_gradients(optimizers, seed):
    """New gradients in the memory of the old ones."""
    for optimizer in optimizers:
        held = [p.grad for p in parameters_of(optimizer)]
        for p in parameters_of(optimizer):
            p.grad = None
        generator = torch.Generator().manual_seed(seed)
        for p, gradient in zip(parameters_of(optimizer), held, strict=True):
            gradient.copy_(torch.randn(p.shape, generator=generator).to(p.dtype))
            p.grad = gradient


@pytest.mark.parametrize("recipe", ["stochastic", "master", "mixed"])
@pytest.mark.parametrize("name", ["adamw", "nesterov"])
def test_steps_equal_those_of_the_eager_backend(name, recipe):
    ours, eager = (make_optimizer(name, recipe, b, on_gpu()) for b in ("triton", "eager"))
    for optimizer in (ours, eager):
        for seed in range(3):
            for p in parameters_of(optimizer):
                p.grad = torch.empty_like(p)
            same_gradients([optimizer], seed)
            optimizer.scale_next_step(torch.tensor(0.5, device="cuda"))
            optimizer.step()
    assert_same(cpu(snapshot(ours)), cpu(snapshot(eager)))


def cpu(states):
    return [{key: tensor.cpu() for key, tensor in state.items()} for state in states]


@pytest.mark.parametrize("recipe", ["stochastic", "master"])
def test_a_replayed_graph_takes_the_steps_that_calls_would(recipe):
    lr = [torch.tensor(0.01, device="cuda") for _ in range(2)]
    graphed, plain = (
        make_optimizer("adamw", recipe, "triton", on_gpu(), lr=each, capturable=True) for each in lr
    )
    for optimizer in (graphed, plain):
        for p in parameters_of(optimizer):
            p.grad = torch.zeros_like(p)
    same_gradients((graphed, plain), 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graphed.step()
    torch.cuda.current_stream().wait_stream(side)
    plain.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.step()
    for seed in (1, 2, 3):
        same_gradients((graphed, plain), seed)
        for each in lr:
            each.mul_(0.5)
        graph.replay()
        plain.step()
    assert_same(snapshot(graphed), snapshot(plain))
    # Ordinary steps and replays may take turns, and each draws noise of its own.
    same_gradients((graphed, plain), 4)
    for optimizer in (graphed, plain):
        optimizer.step()
    same_gradients((graphed, plain), 5)
    graph.replay()
    plain.step()
    assert_same(snapshot(graphed), snapshot(plain))


def test_gradients_made_inside_of_the_capture_are_those_of_each_replay():
    models = []
    for _ in range(2):
        # Not loaded from one another: a master starts from the weights before the cast.
        torch.manual_seed(0)
        models.append(torch_bf16.cast_model(torch.nn.Linear(64, 64).cuda()))
    optimizers = [torch_bf16.AdamW(m.named_parameters(), lr=1e-2, capturable=True) for m in models]
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)

    def train(model, optimizer):
        optimizer.zero_grad(set_to_none=True)
        # No matrix product: for one that is captured, cuBLAS may choose another order of sums.
        (x * model.weight + model.bias).float().square().mean().backward()
        optimizer.step()

    for optimizer in optimizers:
        optimizer.backend = "triton"
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train(models[0], optimizers[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizers[0].zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        train(models[0], optimizers[0])
    for _ in range(4):
        graph.replay()
    for _ in range(7):
        train(models[1], optimizers[1])
    assert_same(snapshot(optimizers[0]), snapshot(optimizers[1]))


def test_a_step_with_everything_on_the_device_does_not_wait_for_it():
    lr = torch.tensor(0.01, device="cuda")
    optimizer = make_optimizer("adamw", "master", "triton", on_gpu(), lr=lr)
    for p in parameters_of(optimizer):
        p.grad = torch.zeros_like(p)
    same_gradients([optimizer], 0)
    torch_bf16.clip_next_step(optimizer, 1.0, skip_nonfinite=True)
    optimizer.step()
    with waiting_is_an_error():
        torch_bf16.clip_next_step(optimizer, 1.0, skip_nonfinite=True)
        optimizer.step()
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_takes_bf16_gradients_and_skips_on_the_device(unscale):
    scaled, plain = (make_optimizer("adamw", "stochastic", "triton", on_gpu()) for _ in range(2))
    scaler = torch_bf16.GradScaler("cuda", init_scale=512.0)
    for optimizer in (scaled, plain):
        for p in parameters_of(optimizer):
            p.grad = torch.zeros_like(p)
    for seed in range(3):
        same_gradients((scaled, plain), seed)
        scale = scaler.scale(torch.ones((), device="cuda"))
        with torch.no_grad():
            for p in parameters_of(scaled):
                p.grad.mul_(scale)
        if seed == 1:
            # The NaN that CUDA makes.
            parameters_of(scaled)[1].grad.view(torch.int16)[0] = 0x7FFF
        if unscale:
            scaler.unscale_(scaled)
        scaler.step(scaled)
        scaler.update()
        if seed != 1:
            plain.step()
    assert scaled.skipped_steps == 1
    assert_same(snapshot(scaled), snapshot(plain))


# Inductor says so once, of every GPU that has them, and imports torch.jit.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_compiled_model_trains_beside_the_fused_step():
    torch.manual_seed(0)
    model = torch_bf16.cast_model(torch.nn.Linear(64, 64).cuda())
    optimizer = torch_bf16.AdamW(model.named_parameters(), lr=1e-2, backend="triton")
    compiled, losses = torch.compile(model), []
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(30):
        loss = compiled(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert losses[-1] < losses[0] / 2


def test_total_norm_is_the_same_at_every_run():
    optimizer = make_optimizer("sgd", "master", "triton", on_gpu())
    gradient = torch.randn(1_000_003, device="cuda").bfloat16()
    p = torch.nn.Parameter(torch.zeros_like(gradient))
    p.grad = gradient
    norms = {torch_bf16.total_norm([p]).item() for _ in range(10)}
    assert len(norms) == 1
    # 2**-24 for each of at most 64 roundings on the way of a square to its sum.
    assert norms.pop() == pytest.approx(gradient.double().norm().item(), rel=64 * 2.0**-24)
    assert parameters_of(optimizer)


@pytest.mark.skipif(not os.path.exists(SANITIZER), reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_compute_sanitizer_finds_nothing(tool):
    script = (
        f"import sys; sys.path[:0] = {[HERE, SUPPORT]}\n"
        "from test_triton_gpu_steps import *\n"
        "o = make_optimizer('adamw', 'mixed', 'triton', on_gpu())\n"
        "for p in parameters_of(o): p.grad = torch.zeros_like(p)\n"
        "for seed in range(2): same_gradients([o], seed); o.step()\n"
        "torch.cuda.synchronize()\n"
    )
    sanitize(SANITIZER, tool, [sys.executable, "-c", script])
