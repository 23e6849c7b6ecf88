"""Parameters that an optimizer with released gradients has no more, or never got."""

import pytest
import torch
from torch import nn

import torch_bf16

BF16 = torch.bfloat16


def parameter(*shape):
    return nn.Parameter(torch.randn(shape).to(BF16))


def backward(*parameters):
    sum(each.float().square().sum() for each in parameters).backward()


@pytest.mark.parametrize("frozen", [False, True], ids=["alone", "beside frozen ones"])
def test_a_parameter_that_left_keeps_its_gradient_for_another_optimizer(frozen):
    kept, left, still = parameter(8, 8), parameter(8, 8), parameter(4)
    still.requires_grad_(not frozen)
    groups = [{"params": [kept, still]}, {"params": [left]}]
    optimizer = torch_bf16.AdamW(groups, release={"max_norm": None})
    backward(kept, left)
    optimizer.step()
    del optimizer.param_groups[1], optimizer.state[left]
    for _ in range(3):
        before = kept.detach().clone()
        backward(kept, left)
        assert torch.equal(left.grad, 2 * left.detach())
        assert kept.grad is None
        assert not torch.equal(kept, before)
        optimizer.step()
        left.grad = None
    optimizer.add_param_group({"params": [left]})
    backward(kept, left)
    assert left.grad is None


def test_a_refused_group_is_not_hooked():
    matrix, vector = parameter(8, 8), parameter(8)
    optimizer = torch_bf16.Muon([matrix], release={"max_norm": None})
    with pytest.raises(ValueError, match=r"number 0 of group 1 has shape \(8,\).*use_muon=False"):
        optimizer.add_param_group({"params": [vector]})
    assert len(optimizer.param_groups) == 1
    for _ in range(2):
        backward(matrix, vector)
        assert torch.equal(vector.grad, 2 * vector.detach())
        assert matrix.grad is None
        optimizer.step()
        vector.grad = None


def test_a_refused_group_has_gradients_of_its_own_dtype():
    matrix, vector = parameter(8, 8), parameter(8)
    optimizer = torch_bf16.Muon([matrix], recipe=torch_bf16.Recipe(accumulate="fp32"))
    with pytest.raises(ValueError, match="use_muon=False"):
        optimizer.add_param_group({"params": [vector]})
    backward(matrix, vector)
    assert (matrix.grad.dtype, vector.grad.dtype) == (torch.float32, BF16)
