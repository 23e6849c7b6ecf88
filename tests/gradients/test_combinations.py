"""Features together: what one of them asks of the others holds, or is refused before training."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from exported import export_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_bf16
from torch_bf16 import UpdateMonitor
from torch_bf16.errors import CheckpointError
from torch_bf16.gradients import gathering


def network(recipe="bf16-stochastic"):
    torch.manual_seed(0)
    return torch_bf16.cast_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), recipe)


def backward(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 8, generator=generator).bfloat16()
    model(x).float().square().mean().backward()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class WithoutStep(torch.optim.Optimizer):
    """Gradient descent that counts nothing."""

    def __init__(self, params, lr=0.5):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


def test_an_optimizer_without_a_fused_rule_can_be_watched():
    model = network()
    optimizer = torch_bf16.convert(torch.optim.Adamax(model.parameters()), model=model)
    monitor = UpdateMonitor(optimizer, every=1)
    backward(model)
    optimizer.step()
    assert monitor.layers == {}
    assert monitor.take_metrics()["bf16/gradient_norm"] > 0


def test_release_with_an_optimizer_without_a_fused_rule_is_refused():
    model = network()
    optimizer = torch_bf16.convert(WithoutStep(model.parameters()), model=model)
    with pytest.raises(NotImplementedError, match=r"has no fused rule.*step after the backward"):
        torch_bf16.release_gradients(model, optimizer)
    before = weights(model)
    backward(model)
    assert same(before, weights(model))
    optimizer.step()
    assert not same(before, weights(model))


def test_two_optimizers_cannot_release_the_same_gradients():
    model = network()
    one, other = (torch_bf16.SGD(model.parameters(), lr=0.1) for _ in range(2))
    torch_bf16.release_gradients(model, one)
    with pytest.raises(NotImplementedError, match="another optimizer has released"):
        torch_bf16.release_gradients(model, other)
    backward(model)
    one.step()


def test_an_optimizer_that_is_gone_leaves_the_gradients_to_the_next_one():
    model = network()
    torch_bf16.release_gradients(model, torch_bf16.SGD(model.parameters(), lr=0.1))
    gc.collect()
    optimizer = torch_bf16.SGD(model.parameters(), lr=0.1)
    torch_bf16.release_gradients(model, optimizer)
    for _ in range(2):
        before = weights(model)
        backward(model)
        assert not same(before, weights(model))
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()


def test_a_released_step_cannot_be_skipped_afterwards():
    model = network()
    optimizer = torch_bf16.SGD(model.parameters(), lr=0.1)
    torch_bf16.release_gradients(model, optimizer)
    with pytest.raises(NotImplementedError, match="cannot be skipped after it"):
        optimizer.skip_next_step_where(torch.ones(()))


def test_a_gradient_that_waits_is_not_used_where_a_nested_pass_brings_another():
    layer = torch_bf16.cast_model(nn.Linear(8, 8))
    optimizer = torch_bf16.SGD(layer.parameters(), lr=0.5)
    torch_bf16.release_gradients(layer, optimizer)
    before = weights(layer)
    x = torch.ones(2, 8, dtype=torch.bfloat16, requires_grad=True)
    y = layer(checkpoint(layer, x, use_reentrant=True))
    with pytest.raises(NotImplementedError, match=r"\. Neither gradient was used$"):
        y.float().square().mean().backward()
    assert same(before, weights(layer))


def test_a_second_backward_pass_that_release_refuses_leaves_nothing_to_step_with():
    model = network()
    optimizer = torch_bf16.SGD(model.parameters(), lr=0.5)
    torch_bf16.release_gradients(model, optimizer)
    backward(model)
    after_one = weights(model)
    with pytest.raises(NotImplementedError, match="second gradients were not used"):
        backward(model, seed=1)
    optimizer.step()
    assert same(after_one, weights(model))


@pytest.mark.parametrize("make", [WithoutStep, torch.optim.Adamax, torch_bf16.SGD])
def test_sums_of_two_steps_draw_noise_of_their_own(make):
    recipe = torch_bf16.get_recipe("bf16-stochastic", accumulate="bf16_stochastic")
    model = network(recipe)
    optimizer = make(model.parameters(), lr=0.0)
    if not isinstance(optimizer, torch_bf16.BF16Optimizer):
        optimizer = torch_bf16.convert(optimizer, recipe, model=model)
    else:
        optimizer = torch_bf16.SGD(model.named_parameters(), lr=0.0, recipe=recipe)
    sums = []
    for _ in range(2):
        for seed in range(4):
            backward(model, seed)
        sums.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    assert not same(*sums)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_run_resumed_between_steps_sums_as_the_uninterrupted_one(set_to_none):
    recipe = torch_bf16.get_recipe("bf16-stochastic", accumulate="bf16_stochastic")

    def fresh():
        model = network(recipe)
        return model, torch_bf16.AdamW(model.named_parameters(), lr=1e-2, recipe=recipe)

    def window(model, optimizer, seed):
        for micro_batch in range(3):
            backward(model, 10 * seed + micro_batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    model, optimizer = fresh()
    for seed in range(2):
        window(model, optimizer, seed)
    resumed, its = fresh()
    resumed.load_state_dict(model.state_dict())
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if not set_to_none:
        for p in resumed.parameters():
            p.grad = torch.zeros_like(p)
    for seed in range(2, 4):
        window(model, optimizer, seed)
        window(resumed, its, seed)
    assert same(weights(model), weights(resumed))


@pytest.mark.parametrize(
    "make",
    [lambda m, o: m, lambda m, o: o.param_groups, lambda m, o: m.named_parameters()],
    ids=["module", "groups", "names"],
)
def test_what_has_no_gradient_to_clip_is_named(make):
    model = network()
    optimizer = torch_bf16.SGD(model.parameters(), lr=0.1)
    for clip in (torch_bf16.total_norm, lambda given: torch_bf16.clip_grad_norm_(given, 1.0)):
        with pytest.raises(ValueError, match=r"give parameters, for example model.parameters\(\)"):
            clip(make(model, optimizer))
    for clip in (torch_bf16.total_norm, lambda given: torch_bf16.clip_grad_norm_(given, 1.0)):
        with pytest.raises(
            ValueError, match=r"of an SGD were asked for.* clip_next_step\(optimizer"
        ):
            clip(optimizer)
    with pytest.raises(ValueError, match="given a Linear for an optimizer; give those that take"):
        torch_bf16.clip_next_step(nn.Linear(2, 2), 1.0)
    with pytest.raises(ValueError, match="max_norm='a' must be a number"):
        torch_bf16.clip_next_step(optimizer, "a")
    with pytest.raises(ValueError, match=r"norm_type=inf was asked for, .* the 2-norm only"):
        torch_bf16.clip_grad_norm_(model.parameters(), 1.0, float("inf"))


def test_clip_grad_norm_takes_the_arguments_of_torchs():
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    norm = torch_bf16.clip_grad_norm_([parameter], 1.0, 2, True, foreach=False)
    assert norm == 2.0
    assert torch.allclose(parameter.grad, torch.full((4,), 0.5))


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    model = network("bf16-fp32-master")
    optimizer = torch_bf16.AdamW(model.named_parameters(), recipe="bf16-fp32-master")
    backward(model)
    optimizer.step()
    path = tmp_path / "run.pt"
    torch_bf16.save_checkpoint(path, model=model, optimizer=optimizer)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        export_file(path, tmp_path / "fp32.pt")


@pytest.mark.parametrize("thawed", [False, True])
@pytest.mark.parametrize("sums", ["bf16_stochastic", "fp32"])
@pytest.mark.parametrize("released_first", [False, True])
def test_released_steps_see_the_whole_sum_in_whichever_order_both_were_asked_for(
    sums, released_first, thawed, monkeypatch
):
    # Each step is taken as soon as its gradient has arrived.
    monkeypatch.setattr(gathering, "LIMIT", 1)

    def run(release, released_first=False):
        model = network()
        optimizer = torch_bf16.AdamW(model.named_parameters(), lr=0.1)
        model[0].requires_grad_(not thawed)
        steps = [lambda: torch_bf16.accumulate_gradients(model, optimizer, sums)]
        if release:
            steps += [lambda: torch_bf16.release_gradients(model, optimizer, accumulation_steps=2)]
        for each in reversed(steps) if released_first else steps:
            each()
        for step in range(3):
            for number in range(2):
                backward(model, 2 * step + number)
            # What is thawed between two steps is released from the second one on.
            if release and not (thawed and step == 1):
                assert [p.grad for p in model.parameters()] == [None] * 4
            optimizer.step()
            optimizer.zero_grad()
            model[0].requires_grad_(True)
        return weights(model)

    assert same(run(release=True, released_first=released_first), run(release=False))


@pytest.mark.parametrize("function", ["accumulate_gradients", "release_gradients"])
def test_a_handle_that_another_replaced_ends_nothing(function):
    model = network()
    optimizer = torch_bf16.AdamW(model.named_parameters(), lr=0.1)
    arguments = ["fp32"] if function == "accumulate_gradients" else []
    first, second = (getattr(torch_bf16, function)(model, optimizer, *arguments) for _ in range(2))
    first.remove()
    kept = optimizer._engine.accumulation if arguments else optimizer._engine.release
    assert kept is second
    backward(model)
    gradients = [p.grad for p in model.parameters()]
    if arguments:
        assert all(each.dtype == torch.float32 for each in gradients)
    else:
        assert gradients == [None] * len(gradients)
