"""Parameters without a gradient under an optimizer that steps by its own code."""

import copy

import pytest
import torch
import torch.distributed as dist
from foreign_cases import OWN, exact_weights, make_run
from optimizer_cases import bits

import torch_bf16


class TakesMissingForZero(torch.optim.Optimizer):
    """Momentum and decay go on without a gradient, as in distributed implementations of Muon."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.seen = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.seen += 1
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                speed = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                speed.mul_(0.9).add_(p.grad)
                p.mul_(0.99).sub_(speed, alpha=group["lr"])


class Decays(torch.optim.SGD):
    """Writes weights in place of the gradient that is missing, without making one."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.99)
                if p.grad is not None:
                    p.data.sub_(p.grad, alpha=group["lr"])


class Fades(torch.optim.Optimizer):
    """Lets momentum fade without a gradient, and leaves the weight where it is."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                speed = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                speed.mul_(0.9)
                if p.grad is not None:
                    p.sub_(speed.add_(p.grad), alpha=group["lr"])


class Counts(torch.optim.SGD):
    """Leaves them alone, and counts the parameters that each step gets."""

    def step(self, closure=None):
        self.seen = [*getattr(self, "seen", []), sum(len(g["params"]) for g in self.param_groups)]
        super().step()


class Divides(torch.optim.Optimizer):
    """The same, each parameter on one rank, which sends the weight to the others."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for n, p in enumerate(group["params"]):
                if n % dist.get_world_size() == dist.get_rank():
                    if p.grad is None:
                        p.grad = torch.zeros_like(p)
                    speed = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    p.sub_(speed.mul_(0.9).add_(p.grad), alpha=group["lr"])
                dist.broadcast(p.detach(), n % dist.get_world_size())


def train(model, optimizer, seeds):
    """Steps in which every second parameter has a gradient: other ones in odd steps."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for n, p in enumerate(model.parameters()):
            gradient = torch.randn(p.shape, generator=generator).bfloat16()
            p.grad = gradient.to(p.dtype) if n % 2 == seed % 2 else None
        optimizer.step()


@pytest.mark.parametrize("kind", [TakesMissingForZero, Decays, Fades, OWN["adamax"], OWN["nadam"]])
@pytest.mark.parametrize("bucket_bytes", [1, 64 << 20], ids=["a tensor at a time", "all at once"])
def test_with_exact_masters_they_are_those_of_the_fp32_run_bit_for_bit(kind, bucket_bytes):
    runs = [make_run(kind, recipe) for recipe in (None, "bf16-fp32-master")]
    runs[1][1].bucket_bytes = bucket_bytes
    for run in runs:
        train(*run, range(12))
    (fp32, reference), (model, optimizer) = runs
    exact = exact_weights(model, optimizer)
    for each, (key, value) in zip(exact, fp32.named_parameters(), strict=True):
        assert torch.equal(bits(each), bits(value)), key
    assert getattr(optimizer, "seen", 0) == getattr(reference, "seen", 0) or bucket_bytes == 1


def test_a_resumed_run_goes_on_with_their_momentum():
    model, optimizer = make_run(TakesMissingForZero, "bf16-stochastic")
    train(model, optimizer, range(5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, loaded = make_run(TakesMissingForZero, "bf16-stochastic")
    other.load_state_dict(saved[0])
    loaded.load_state_dict(saved[1])
    for run in ((model, optimizer), (other, loaded)):
        train(*run, range(5, 9))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_class_that_leaves_them_alone_gets_them_once_and_no_states_are_stored():
    model, optimizer = make_run(lambda p: Counts(p, lr=0.1, momentum=0.9), "bf16-fp32-master")
    first, *others = model.parameters()
    before = [bits(each) for each in exact_weights(model, optimizer)]
    for _ in range(3):
        first.grad = torch.ones_like(first)
        optimizer.step()
    assert optimizer.seen == [len(others) + 1, 1, 1]
    assert {*optimizer.state} == {first}
    after = [bits(each) for each in exact_weights(model, optimizer)]
    assert [*map(torch.equal, after, before)] == [False] + [True] * len(others)


def test_frozen_ones_are_left_alone():
    model, optimizer = make_run(TakesMissingForZero, "bf16-stochastic")
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    model[3].weight.grad = torch.ones_like(model[3].weight)
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert model[0].weight not in optimizer.state
    assert model[1].weight in optimizer.state
    assert torch_bf16.describe(model, optimizer).recipe == "bf16-stochastic"


def divided(recipe):
    model, optimizer = make_run(Divides, recipe)
    train(model, optimizer, range(6))
    return [p.detach().float() for p in model.parameters()]


def test_ranks_that_divide_the_work_agree_on_every_bit(ranks):
    first, second = ranks(2, divided, "bf16-stochastic")
    assert all(map(torch.equal, first, second))
    fp32, _ = ranks(2, divided, None)
    for each, reference in zip(first, fp32, strict=True):
        torch.testing.assert_close(each, reference, rtol=0.05, atol=0.02)
