"""Optimizers to be given bad input, and what shows that they survive it."""

import pytest
import torch
from torch import nn

import torch_bf16

BF16 = torch.bfloat16
OURS = {"adamw": torch_bf16.AdamW, "adam": torch_bf16.Adam, "sgd": torch_bf16.SGD}
every_class = pytest.mark.parametrize("ours", OURS.values(), ids=OURS)


def parameter(*shape, dtype=BF16):
    shape = shape or (4, 3)
    if dtype.is_floating_point or dtype.is_complex:
        return nn.Parameter(torch.ones(shape).to(dtype))
    return nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=False)


def params(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def begun(ours=torch_bf16.AdamW, steps=2, **options):
    """An optimizer over a matrix, a vector and an fp32 matrix in groups of their own."""
    values = [parameter(), parameter(5), parameter(2, 2, dtype=torch.float32)]
    optimizer = ours([{"params": [p]} for p in values], lr=0.1, **options)
    for _ in range(steps):
        give_gradients(optimizer)
        optimizer.step()
    give_gradients(optimizer)
    return optimizer


def give_gradients(optimizer):
    for p in params(optimizer):
        p.grad = torch.full_like(p, 0.5)


def everything(optimizer):
    values = [p.detach().clone() for p in params(optimizer)]
    for p in params(optimizer):
        state = optimizer.state.get(p, {})
        values += [v.clone() for v in state.values() if isinstance(v, torch.Tensor)]
    return values


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def assert_steps(optimizer):
    """Every parameter moves, against its gradient, by a finite amount."""
    before = [p.detach().clone() for p in params(optimizer)]
    give_gradients(optimizer)
    optimizer.step()
    for p, old in zip(params(optimizer), before, strict=True):
        assert p.isfinite().all()
        assert (p < old).all()


def assert_step_refused(optimizer, error, match, unlike=None):
    """The step changes nothing: no weight, no state, no counter."""
    before = everything(optimizer)
    with pytest.raises(error, match=match):
        optimizer.step()
    assert_equal(everything(optimizer), before)
