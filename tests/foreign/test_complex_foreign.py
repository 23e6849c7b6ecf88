"""Optimizers without a fused rule step complex parameters themselves, on complex64 copies."""

import copy

import pytest
import torch
from complex_cases import conjugated, make_tensors, random_gradients, scattered
from foreign_cases import Normed
from torch import nn

from torch_bf16 import convert


class ComplexAdam(torch.optim.Optimizer):
    """Adam by magnitudes: the second moment of a complex parameter is real."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p.abs())
                state["exp_avg"].lerp_(p.grad, 0.1)
                state["exp_avg_sq"].lerp_(p.grad.abs().square(), 0.01)
                p.sub_(group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6))


def complex_ones(optimizer):
    return [p for p in optimizer.param_groups[0]["params"] if p.is_complex()]


def make(kind):
    optimizers = [kind([nn.Parameter(t.clone()) for t in make_tensors().values()]) for _ in "ab"]
    bf16 = [p for p in optimizers[1].param_groups[0]["params"] if p.dtype == torch.bfloat16]
    for p in bf16:
        p.data = p.data.float()
    return optimizers


def step(optimizers, seed, form):
    gradients = random_gradients(optimizers[0], seed)
    if seed == 1:
        gradients[1] = None
    for each in optimizers:
        for p, gradient in zip(each.param_groups[0]["params"], gradients, strict=True):
            p.grad = None if gradient is None else form(gradient).to(p.dtype)
        each.step()


@pytest.mark.parametrize("kind", [ComplexAdam, Normed])
@pytest.mark.parametrize("form", [torch.clone, conjugated, scattered])
def test_complex_parameters_get_the_bits_of_the_class_itself(kind, form):
    ours, theirs = make(kind)
    start = copy.deepcopy(complex_ones(ours))
    convert(ours, "bf16-fp32-master")
    for seed in range(4):
        step((ours, theirs), seed, form)
    # The exact master of the bf16 parameter keeps the norm of all gradients the same as well.
    for p, other, first in zip(complex_ones(ours), complex_ones(theirs), start, strict=True):
        assert torch.equal(p, other)
        assert (p != first).all()
        state, own = ours.state[p], theirs.state[other]
        assert all(torch.equal(state[key], each) for key, each in own.items())
        assert all(state[key].dtype == each.dtype for key, each in own.items())


def test_a_resumed_run_repeats_every_bit():
    ours, again = (convert(make(ComplexAdam)[0], "bf16-stochastic") for _ in "ab")
    for seed in range(2):
        step([ours], seed, torch.clone)
    pairs = [*zip(*(each.param_groups[0]["params"] for each in (ours, again)), strict=True)]
    with torch.no_grad():
        for p, other in pairs:
            other.copy_(p)
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    step([ours, again], 2, torch.clone)
    assert all(torch.equal(p, other) for p, other in pairs)
