"""Steps inside the backward pass: the bits of ordinary ones, and no gradient that stays."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import torch_bf16
from torch_bf16 import Recipe
from torch_bf16.gradients import gathering

RECIPE_NAMES = ("bf16-stochastic", "bf16-fp32-master")


class Tied(nn.Module):
    """An embedding that is also the output, a norm, and a parameter of its own."""

    def __init__(self, width=16, depth=3):
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)) + x
        return self.head(self.norm(x))


def setup(recipe="bf16-stochastic", cls=torch_bf16.AdamW, **options):
    torch.manual_seed(0)
    model = torch_bf16.cast_model(Tied(), recipe)
    named = list(model.named_parameters())
    halves = [
        {"params": named[::2], "lr": 0.01, **options},
        {"params": named[1::2], "lr": 0.02, **options},
    ]
    return model, cls(halves, lr=0.01, recipe=recipe)


def backward(model, step):
    torch.manual_seed(100 + step)
    tokens = torch.randint(20, (4, 8))
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(
            model(tokens).flatten(0, 1).float(), tokens.flatten()
        )
    loss.backward()
    return loss


def train(model, optimizer, steps, scheduler=None):
    for step in steps:
        backward(model, step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


def same(one, other):
    model, optimizer = one
    other_model, other_optimizer = other
    for a, b in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(a, b)
        state, other_state = optimizer.state[a], other_optimizer.state[b]
        assert state.keys() == other_state.keys()
        assert all(torch.equal(state[key], other_state[key]) for key in state)
    return True


@pytest.mark.parametrize("cls", [torch_bf16.AdamW, torch_bf16.SGD])
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_bits_are_those_of_ordinary_steps(recipe, cls):
    plain, released = setup(recipe, cls), setup(recipe, cls)
    torch_bf16.release_gradients(*released)
    schedulers = [torch.optim.lr_scheduler.StepLR(each[1], 2) for each in (plain, released)]
    for (model, optimizer), scheduler in zip((plain, released), schedulers, strict=True):
        train(model, optimizer, range(5), scheduler)
    assert same(plain, released)


def test_every_gradient_is_dead_after_backward():
    model, optimizer = setup()
    torch_bf16.release_gradients(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, 0)
    assert all(p.grad is None for p in model.parameters())
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("waiting", [1, 5])
def test_gradients_that_live_at_once_are_no_more_than_share_a_kernel_call(monkeypatch, waiting):
    """Live bytes are counted at every gradient: one plain run as the control."""
    monkeypatch.setattr(gathering, "LIMIT", waiting * 32 * 32 * 2)

    def peak(release):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(12))).bfloat16()
        optimizer = torch_bf16.AdamW(model.parameters(), lr=0.01)
        live = 0

        def count(parameter):
            nonlocal live
            found = [p.grad for p in model.parameters() if p.grad is not None]
            live = max(live, sum(g.numel() * g.element_size() for g in found))

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(count)
        if release:
            torch_bf16.release_gradients(model, optimizer)
        for _ in range(2):
            model(torch.randn(4, 32).bfloat16()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return live

    assert peak(release=False) == 12 * 32 * 32 * 2
    assert peak(release=True) == waiting * 32 * 32 * 2


def test_a_resumed_run_repeats_the_uninterrupted_one():
    whole, half, resumed = setup(), setup(), setup()
    for each in (whole, half, resumed):
        torch_bf16.release_gradients(*each)
    train(*whole, range(6))
    train(*half, range(3))
    resumed[0].load_state_dict(copy.deepcopy(half[0].state_dict()))
    resumed[1].load_state_dict(copy.deepcopy(half[1].state_dict()))
    train(*resumed, range(3, 6))
    assert same(whole, resumed)


def test_remove_returns_to_ordinary_steps_with_the_same_bits():
    plain, changing = setup(), setup()
    train(*plain, range(6))
    train(*changing, range(2))
    handle = torch_bf16.release_gradients(*changing)
    train(*changing, range(2, 4))
    handle.remove()
    backward(changing[0], 4)
    assert all(p.grad is not None for p in changing[0].parameters())
    changing[1].step()
    changing[1].zero_grad()
    train(*changing, range(5, 6))
    assert same(plain, changing)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_model_may_be_copied_and_averaged_and_its_copy_takes_ordinary_steps(copied):
    model, optimizer = setup()
    torch_bf16.release_gradients(model, optimizer)
    train(model, optimizer, range(2))
    twin, its_optimizer = copied((model, optimizer))
    assert torch_bf16.EMA(model, 0.9).module is not model
    train(model, optimizer, range(2, 4))
    backward(twin, 2)
    assert all(p.grad is not None for p in twin.parameters())
    its_optimizer.step()
    its_optimizer.zero_grad()
    train(twin, its_optimizer, range(3, 4))
    assert same((model, optimizer), (twin, its_optimizer))


def test_the_step_counts_and_takes_what_came_by_another_way():
    model, optimizer = setup()
    torch_bf16.release_gradients(model, optimizer)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loss = optimizer.step(lambda: backward(model, 0))
    scheduler.step()  # would warn if no step had been counted
    assert loss.isfinite()
    assert calls == [1]
    by_hand = model.layers[0].weight
    before = by_hand.detach().clone()
    by_hand.grad = torch.ones_like(by_hand)
    optimizer.step()
    assert not torch.equal(by_hand, before)
    assert optimizer.state[by_hand]["step"] == 2


@pytest.mark.parametrize("by", ["the optimizer", "hand"])
def test_passes_are_counted_anew_after_a_gradient_was_discarded(by):
    p = nn.Parameter(torch.ones(8).bfloat16())
    optimizer = torch_bf16.SGD([p], lr=0.5, release={"accumulation_steps": 2, "max_norm": None})
    before = p.detach().clone()
    p.sum().backward()
    if by == "hand":
        p.grad = None
    else:
        optimizer.zero_grad()
    p.sum().backward()
    assert torch.equal(p, before)
    p.sum().backward()
    assert torch.equal(p, before - 1)


def test_a_frozen_parameter_may_be_thawed():
    model, optimizer = setup()
    model.layers[1].weight.requires_grad_(False)
    torch_bf16.release_gradients(model, optimizer)
    train(model, optimizer, range(2))
    model.layers[1].weight.requires_grad_()
    before = model.layers[1].weight.detach().clone()
    train(model, optimizer, range(2, 4))
    assert model.layers[1].weight.grad is None
    assert not torch.equal(before, model.layers[1].weight)


@pytest.mark.parametrize("max_norm", [0.01, 0.1])
def test_clipping_by_each_parameters_norm_is_torch_clipping_each(max_norm):
    plain, released = setup(cls=torch_bf16.SGD), setup(cls=torch_bf16.SGD)
    torch_bf16.release_gradients(*released, max_norm=max_norm)
    for step in range(3):
        backward(plain[0], step)
        for parameter in plain[0].parameters():
            norm = torch_bf16.total_norm(parameter)
            coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            kept = {p: p.grad for p in plain[0].parameters() if p is not parameter}
            for p in kept:
                p.grad = None
            plain[1].scale_next_step(coefficient)
            plain[1].step()
            for p, gradient in kept.items():
                p.grad = gradient
            parameter.grad = None
        backward(released[0], step)
        released[1].step()
    assert same(plain, released)


def test_clipping_by_the_last_steps_norm():
    plain, released = setup(cls=torch_bf16.SGD), setup(cls=torch_bf16.SGD)
    handle = torch_bf16.release_gradients(*released, max_norm=0.1, norm="last_step")
    last = None
    for step in range(4):
        if last is not None:
            backward(plain[0], step)
            norm = torch_bf16.total_norm(plain[0].parameters())
            plain[1].scale_next_step((0.1 / (last + 1e-6)).clamp(max=1.0))
            plain[1].step()
            plain[1].zero_grad()
            last = norm
        backward(released[0], step)
        released[1].step()
        if last is None:
            # The first step is clipped per parameter; the comparison starts after it.
            last = handle.last_norm
            plain[0].load_state_dict(released[0].state_dict())
            plain[1].load_state_dict(released[1].state_dict())
        torch.testing.assert_close(handle.last_norm, last, rtol=1e-6, atol=0)
        last = handle.last_norm
    assert same(plain, released)


def test_what_is_saved_after_a_release_clips_by_its_last_norm():
    """As by a Trainer, which saves after a fit that has ended the release."""
    whole, half, resumed = (setup(cls=torch_bf16.SGD) for _ in range(3))
    handles = [
        torch_bf16.release_gradients(*each, max_norm=0.1, norm="last_step")
        for each in (whole, half, resumed)
    ]
    train(*whole, range(4))
    train(*half, range(2))
    handles[1].remove()
    for ours, theirs in zip(resumed, half, strict=True):
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    train(*resumed, range(2, 4))
    assert same(whole, resumed)
    train(*half, range(2, 3))  # after an ordinary step it is no longer the norm of the last one
    assert "last_norm" not in half[1].state_dict()["torch_bf16"]


@pytest.mark.parametrize("norm", ["parameter", "last_step"])
def test_norms_whose_squares_overflow_in_fp32_are_added_up_right(norm):
    model = nn.ParameterList(torch.zeros(1) for _ in range(4))
    optimizer = torch_bf16.SGD(model.parameters(), lr=1.0)
    handle = torch_bf16.release_gradients(model, optimizer, max_norm=1.0, norm=norm)
    for _ in range(2):
        torch.cat(list(model)).mul(1e25).sum().backward()
        optimizer.step()
    moved = 2.0 if norm == "parameter" else 1.5
    torch.testing.assert_close(torch.cat(list(model)).detach(), torch.full((4,), -moved))
    if norm == "last_step":
        assert handle.last_norm.item() == pytest.approx(2e25)


def test_what_cannot_work_is_refused_with_what_does():
    model, optimizer = setup()
    torch_bf16.release_gradients(model, optimizer)
    backward(model, 0)
    with pytest.raises(NotImplementedError, match=r"nothing is left to clip\. Clip with"):
        torch_bf16.total_norm(model.parameters())
    with pytest.raises(NotImplementedError, match="To clip, call release_gradients"):
        optimizer.scale_next_step(0.5)
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        NotImplementedError,
        match=r"another backward pass reached.*another model.s loss.*requires_grad_\(False\)",
    ):
        backward(model, 1)
    assert all(map(torch.equal, weights, model.parameters()))
    optimizer.grad_scale = torch.ones(())
    with pytest.raises(NotImplementedError, match="train without GradScaler"):
        optimizer.step()


def test_what_cannot_be_released_is_refused():
    model, optimizer = setup()
    with pytest.raises(ValueError, match=r"release_gradients was given an SGD, .*by a recipe"):
        torch_bf16.release_gradients(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="norm='global' is unknown; use one of parameter, last"):
        torch_bf16.release_gradients(model, optimizer, max_norm=1.0, norm="global")
    with pytest.raises(ValueError, match="max_norm=0 must be a positive number"):
        torch_bf16.release_gradients(model, optimizer, max_norm=0)
    with pytest.raises(ValueError, match="accumulation_steps=0 must be an int of at least 1"):
        torch_bf16.release_gradients(model, optimizer, accumulation_steps=0)
    torch_bf16.release_gradients(model, optimizer)
    with pytest.raises(ValueError, match="its gradients are released"):
        torch_bf16.UpdateMonitor(optimizer)
    watched = setup()
    torch_bf16.UpdateMonitor(watched[1])
    with pytest.raises(NotImplementedError, match="an UpdateMonitor watches"):
        torch_bf16.release_gradients(*watched)


def test_describe_counts_what_gradients_really_take():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))).bfloat16()
    for accumulate, size in (("bf16_nearest", 2.0), ("bf16_stochastic", 2.0), ("fp32", 4.0)):
        recipe = Recipe("mine", accumulate=accumulate)
        optimizer = torch_bf16.AdamW(model.parameters(), recipe=recipe)
        assert torch_bf16.describe(model, optimizer).bytes_by_role["gradients"] == size
        torch_bf16.accumulate_gradients(model, optimizer, "bf16_nearest")
    optimizer = torch_bf16.AdamW(model.parameters())
    torch_bf16.release_gradients(model, optimizer)
    # They wait for one another, as far as that takes 32 MiB.
    assert torch_bf16.describe(model, optimizer).bytes_by_role["gradients"] == 2.0
    with torch.device("meta"):
        large = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4))).bfloat16()
    large_ones = torch_bf16.AdamW(large.parameters(), backend="eager")
    torch_bf16.release_gradients(large, large_ones)
    assert torch_bf16.describe(large, large_ones).bytes_by_role["gradients"] == 1.0


def test_a_step_that_failed_once_can_be_taken_after_gradients_are_zeroed(monkeypatch):
    runs = []
    for fails in (False, True):
        model, optimizer = setup()
        options = {"max_norm": 1.0, "norm": "last_step"}
        handle = torch_bf16.release_gradients(model, optimizer, **options)
        if fails:
            before = [p.detach().clone() for p in model.parameters()]
            with monkeypatch.context() as patch:
                patch.setattr(optimizer, "_update", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    backward(model, 0)
            assert all(map(torch.equal, before, model.parameters()))
            optimizer.zero_grad()
        train(model, optimizer, range(2))
        runs.append((model, optimizer, handle.last_norm))
    assert same(runs[0][:2], runs[1][:2])
    assert torch.equal(runs[0][2], runs[1][2])


def test_what_fully_shard_leaves_out_waits_for_the_program_to_reduce_it(one_rank):
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=one_rank, ignored_params={model.bias})
    torch_bf16.cast_model(model)
    optimizer = torch_bf16.SGD(model.parameters(), lr=0.5)
    torch_bf16.release_gradients(model, optimizer)
    before = model.bias.detach().clone()
    model(torch.ones(4, 8).bfloat16()).sum().backward()
    assert model.weight.grad is None
    assert torch.equal(model.bias, before)
    model.bias.grad.zero_()  # what an all-reduce might leave
    optimizer.step()
    assert torch.equal(model.bias, before)
    assert model.bias.grad is None
