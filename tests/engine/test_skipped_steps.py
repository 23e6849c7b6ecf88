"""What a step may be told by tensors, on the backends that read them on the host.

The same with the Triton backend, which reads nothing there, stands in test_triton_prepare.py.
"""

import gc
import warnings
import weakref

import pytest
import torch
from optimizer_cases import (
    assert_same,
    bits,
    differs,
    every_backend,
    make_optimizer,
    make_parameters,
    parameters_of,
    set_gradients,
    snapshot,
    take_steps,
)
from torch import nn

import torch_bf16


def scaled_step(optimizer, scaler, seed, unscale=False, poison=None):
    """A step under a GradScaler whose scale is a power of two, so that gradients stay exact."""
    parameters = parameters_of(optimizer)
    set_gradients(parameters, seed)
    scale = scaler.scale(torch.ones(()))
    with torch.no_grad():
        for parameter in parameters:
            parameter.grad.mul_(scale)
    if poison is not None:
        parameters[0].grad.view(-1)[0] = poison
    if unscale:
        scaler.unscale_(optimizer)
    before = [bits(p.grad) for p in parameters]
    scaler.step(optimizer)
    if poison is None:
        assert all(map(torch.equal, before, (bits(p.grad) for p in parameters)))
    scaler.update()


@pytest.mark.parametrize("found", [0.0, 1.0], ids=["taken", "skipped"])
def test_a_step_keeps_no_gradient_alive(found):
    optimizer = make_optimizer("adamw", "master", "cpu", make_parameters().items())
    for _ in range(2):
        set_gradients(parameters_of(optimizer), 0)
        references = [weakref.ref(p.grad) for p in parameters_of(optimizer)]
        optimizer.skip_next_step_where(torch.tensor(found))
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert not any(each() is not None for each in references)


@every_backend
@pytest.mark.parametrize(("name", "recipe"), [("adamw", "master"), ("momentum", "stochastic")])
def test_found_inf_leaves_every_bit_and_the_step_count(name, recipe, backend):
    optimizer, other = (
        make_optimizer(name, recipe, backend, make_parameters().items()) for _ in range(2)
    )
    for each in (optimizer, other):
        take_steps(each, [0])
    before = snapshot(optimizer)
    for found in (1.0, float("nan")):
        set_gradients(parameters_of(optimizer), 7)
        optimizer.skip_next_step_where(torch.tensor([found]))
        optimizer.step()
        assert_same(snapshot(optimizer), before)
    assert optimizer.skipped_steps == 2
    optimizer.skip_next_step_where(torch.tensor(False))
    for each in (optimizer, other):
        take_steps(each, [1, 2])
    assert_same(snapshot(optimizer), snapshot(other))
    assert (optimizer.skipped_steps, other.skipped_steps) == (2, 0)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.int32])
def test_a_request_to_skip_is_read_at_the_step(dtype, backend):
    optimizer = make_optimizer("adamw", "master", backend, make_parameters().items())
    take_steps(optimizer, [0])
    before = snapshot(optimizer)
    set_gradients(parameters_of(optimizer), 1)
    found = torch.zeros(1, dtype=dtype)
    optimizer.skip_next_step_where(found)
    # fp32 has no such number.
    found.fill_(1e-60 if dtype == torch.float64 else 1)
    optimizer.step()
    assert_same(snapshot(optimizer), before)
    assert optimizer.skipped_steps == 1


def test_two_requests_to_skip_do_not_take_each_other_away():
    optimizer = make_optimizer("adamw", "master", "cpu", make_parameters().items())
    take_steps(optimizer, [0])
    before = snapshot(optimizer)
    set_gradients(parameters_of(optimizer), 1)
    optimizer.skip_next_step_where(torch.tensor(-1.0))
    optimizer.found_inf = torch.tensor([1.0])
    optimizer.step()
    assert_same(snapshot(optimizer), before)
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, torch_bf16.GradScaler])
@pytest.mark.parametrize("unscale", [False, True])
@every_backend
def test_a_grad_scaler_changes_no_bit_and_skips_what_is_not_finite(backend, unscale, scaler_class):
    scaled, plain = (
        make_optimizer("adamw", "stochastic", backend, make_parameters().items()) for _ in range(2)
    )
    scaler = scaler_class("cpu", init_scale=1024.0)
    for seed in range(2):
        scaled_step(scaled, scaler, seed, unscale)
        take_steps(plain, [seed])
    before = snapshot(scaled)
    assert_same(before, snapshot(plain))
    for poison in (float("inf"), float("nan")):
        scaled_step(scaled, scaler, 5, unscale, poison)
        assert_same(snapshot(scaled), before)
    assert scaled.skipped_steps == 2
    assert scaler.get_scale() == 256.0
    scaled_step(scaled, scaler, 2, unscale)
    take_steps(plain, [2])
    assert_same(snapshot(scaled), snapshot(plain))
    assert not hasattr(scaled, "grad_scale")


@every_backend
def test_a_scale_of_0_skips_where_gradients_are_not_finite_and_is_named_elsewhere(backend):
    optimizer = make_optimizer("adamw", "master", backend, make_parameters().items())
    take_steps(optimizer, [0])
    before = snapshot(optimizer)
    set_gradients(parameters_of(optimizer), 1)
    optimizer.grad_scale, optimizer.found_inf = torch.zeros(()), torch.ones(())
    optimizer.step()
    assert optimizer.skipped_steps == 1
    optimizer.found_inf = torch.zeros(())
    with pytest.raises(ValueError, match=r"^grad_scale=0.0: .* Nothing was updated$"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    del optimizer.grad_scale, optimizer.found_inf
    optimizer.step()
    assert differs(snapshot(optimizer), before)


@every_backend
def test_clipping_after_unscale_counts_the_true_norm(backend):
    scaled, plain = (
        make_optimizer("sgd", "master", backend, make_parameters().items()) for _ in range(2)
    )
    scaler = torch_bf16.GradScaler("cpu", init_scale=4096.0)
    for optimizer in (scaled, plain):
        set_gradients(parameters_of(optimizer), 0)
    with torch.no_grad():
        for parameter in parameters_of(scaled):
            parameter.grad.mul_(scaler.scale(torch.ones(())))
    scaler.unscale_(scaled)
    norms = [torch_bf16.clip_next_step(each, 0.5) for each in (scaled, plain)]
    assert torch.equal(*norms)
    assert norms[0] > 1
    scaler.step(scaled)
    plain.step()
    assert_same(snapshot(scaled), snapshot(plain))


@every_backend
def test_a_norm_that_is_not_finite_skips_the_step_where_that_is_asked(backend):
    optimizer = make_optimizer("adamw", "master", backend, make_parameters().items())
    take_steps(optimizer, [0])
    before = snapshot(optimizer)
    set_gradients(parameters_of(optimizer), 1)
    parameters_of(optimizer)[0].grad[0, 0] = torch.inf
    norm = torch_bf16.clip_next_step(optimizer, 1.0, skip_nonfinite=True)
    optimizer.step()
    assert norm.isinf()
    assert_same(snapshot(optimizer), before)
    assert optimizer.skipped_steps == 1
    optimizer.step()  # on the same gradients
    assert_same(snapshot(optimizer), before)
    assert optimizer.skipped_steps == 2
    # Told for these gradients: the next step takes what it finds.
    set_gradients(parameters_of(optimizer), 2)
    optimizer.step()
    assert differs(snapshot(optimizer), before)
    assert optimizer.skipped_steps == 2


def test_clipping_the_next_step_writes_no_gradient_and_clipping_gradients_does():
    fused, in_place = (
        make_optimizer("sgd", "stochastic", "cpu", make_parameters().items()) for _ in range(2)
    )
    for each in (fused, in_place):
        set_gradients(parameters_of(each), 0)
    before = [bits(p.grad) for p in parameters_of(fused)]
    norm = torch_bf16.clip_next_step([fused], 0.25)
    assert all(map(torch.equal, before, (bits(p.grad) for p in parameters_of(fused))))
    assert torch.equal(norm, torch_bf16.clip_grad_norm_(parameters_of(in_place), 0.25))
    after = torch_bf16.total_norm(parameters_of(in_place))
    # Each gradient is rounded to bf16 once more: at most 2**-9, relative.
    assert after.item() == pytest.approx(0.25, rel=2.0**-9)


def test_clipping_refuses_what_it_cannot_do():
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.full((2,), torch.inf)
    ours, torchs = torch_bf16.SGD([p]), torch.optim.SGD([p])
    with pytest.raises(ValueError, match="given a Parameter for an optimizer; give those that"):
        torch_bf16.clip_next_step([ours, p], 1.0)
    with pytest.raises(ValueError, match="skip_nonfinite=True cannot skip a step of SGD"):
        torch_bf16.clip_next_step(torchs, 1.0, skip_nonfinite=True)
    for clip, given in ((torch_bf16.clip_next_step, ours), (torch_bf16.clip_grad_norm_, p)):
        with pytest.raises(RuntimeError, match="norm of the gradients is inf"):
            clip(given, 1.0, error_if_nonfinite=True)
    assert torch.equal(p.grad, torch.full((2,), torch.inf))


@every_backend
@pytest.mark.parametrize(("name", "recipe"), [("adamw", "stochastic"), ("nesterov", "master")])
def test_a_learning_rate_may_be_a_tensor(name, recipe, backend):
    number, tensor = (
        make_optimizer(name, recipe, backend, make_parameters().items(), lr=lr)
        for lr in (0.0625, torch.tensor(0.0625))
    )
    for each in (number, tensor):
        take_steps(each, [0])
    number.param_groups[0]["lr"] = 0.5
    tensor.param_groups[0]["lr"].fill_(0.5)
    for each in (number, tensor):
        take_steps(each, [1])
    assert_same(snapshot(number), snapshot(tensor))


def test_a_gradscaler_of_ours_leaves_other_optimizers_to_torch():
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.5)
    scaler = torch_bf16.GradScaler("cpu", init_scale=8.0)
    with warnings.catch_warnings():
        scaler.scale(p.sum()).backward()
        scaler.step(optimizer)
    assert torch.equal(p.detach(), torch.full((2,), 0.5))


@every_backend
def test_a_step_under_capture_says_what_a_graph_cannot_repeat(monkeypatch, backend):
    p = nn.Parameter(torch.ones(2, 2))
    p.grad = torch.ones_like(p)
    monkeypatch.setattr(torch_bf16.backends.cuda_graphs, "capturing", lambda devices: True)
    plain = torch_bf16.AdamW([p])
    with pytest.raises(RuntimeError, match="capturable=False"):
        plain.step()
    assert not plain.state
    capturable = torch_bf16.AdamW([p], capturable=True, backend=backend)
    with pytest.raises(RuntimeError, match="take a step with the same parameters before"):
        capturable.step()
    with monkeypatch.context() as patch:
        patch.setattr(torch_bf16.backends.cuda_graphs, "capturing", lambda devices: False)
        capturable.step()
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match=f"the {backend} backend reads step numbers"):
        capturable.step()
    assert torch.equal(p, before)
