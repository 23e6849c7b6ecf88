"""Weights in orders that kernels cannot walk share launches, through copies in shared memory."""

import pytest
import torch
from optimizer_cases import make_optimizer
from torch import nn

from torch_bf16.engine import scratch
from torch_bf16.engine.scratch import Scratch, in_turns

BF16 = torch.bfloat16
STRIDED = {"transposed": (1, 0, 2, 3), "reversed": (3, 2, 1, 0)}


def weights(layout=None):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(3, n, 2, 5, generator=generator).to(BF16) for n in (1, 4, 7, 2, 3)]
    if layout is not None:
        order = STRIDED[layout]
        back = [order.index(n) for n in range(4)]
        made = [each.permute(order).contiguous().permute(back) for each in made]
    return [nn.Parameter(each) for each in made]


def launches(optimizer):
    return [len(each.rows) for each in optimizer._engine.plan._launches]


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("elements", [1 << 24, 200, 1])
@pytest.mark.parametrize("layout", STRIDED)
@pytest.mark.parametrize("recipe", ["stochastic", "master"])
def test_they_have_the_bits_of_contiguous_ones(recipe, layout, elements, backend, monkeypatch):
    monkeypatch.setattr(scratch, "_ELEMENTS_AT_ONCE", elements)
    strided, plain = weights(layout), weights()
    assert not strided[1].is_contiguous()
    ours = [make_optimizer("adamw", recipe, backend, each) for each in (strided, plain)]
    for number in range(4):
        for one, other in zip(strided, plain, strict=True):
            gradient = None
            if number != 2 or one.shape[1] == 4:
                gradient = torch.randn(one.shape).to(BF16)
            one.grad, other.grad = gradient, None if gradient is None else gradient.clone()
        before = [each._version for each in strided]
        for each in ours:
            each.step()
        raised = [each._version > then for each, then in zip(strided, before, strict=True)]
        assert raised == [each.grad is not None for each in strided]
    for one, other in zip(strided, plain, strict=True):
        assert torch.equal(one, other)
        states = (optimizer.state[each] for optimizer, each in zip(ours, (one, other), strict=True))
        mine, theirs = ([each[key] for key in each] for each in states)
        assert all(map(torch.equal, mine, theirs))
    assert sum(launches(ours[0])) == len(strided)
    if layout == "transposed":
        # The one with a single channel is contiguous then.
        assert len(launches(ours[0])) == {1 << 24: 2, 200: 4, 1: 5}[elements]


def test_copies_share_memory_and_begin_at_multiples_of_64_bytes():
    memory = Scratch()
    first = memory.copies_of([torch.empty(5, 3, dtype=BF16), torch.empty(7)])
    second = memory.copies_of([torch.empty(3, dtype=torch.float32)])
    assert [(each.shape, each.dtype) for each in first] == [((5, 3), BF16), ((7,), torch.float32)]
    assert (first[1].data_ptr() - first[0].data_ptr()) % 64 == 0
    assert second[0].data_ptr() == first[0].data_ptr()
    (larger,) = memory.copies_of([torch.empty(100)])
    first[0].fill_(1.0)
    assert larger.shape == (100,)
    assert torch.equal(first[0], torch.ones(5, 3, dtype=BF16))


def test_a_weight_that_is_too_large_has_a_turn_of_its_own():
    sizes = [1, 1 << 25, 1 << 23, 1 << 23, 1]
    assert in_turns(sizes, int) == [[1], [1 << 25], [1 << 23, 1 << 23], [1]]
