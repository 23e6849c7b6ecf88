"""What clipping promises for the next step goes with the gradients that it was computed for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_bf16


def run():
    """Descent at rate 1 on two weights; the norm of the gradients is 8."""
    parameters = [nn.Parameter(torch.zeros(4, 2)) for _ in range(2)]
    optimizer = torch_bf16.SGD(parameters, lr=1.0)
    give(parameters, 2.0)
    return parameters, optimizer


def give(parameters, value):
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, value)


def assert_moved(parameters, by):
    for parameter in parameters:
        torch.testing.assert_close(parameter.detach(), torch.full((4, 2), -by), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("coefficient", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_clipping_counts_what_the_next_step_was_told_before(coefficient):
    parameters, optimizer = run()
    optimizer.scale_next_step(coefficient)
    for limit, norm in ((100.0, 2.0), (1.0, 2.0), (1.0, 1.0)):
        found = torch_bf16.clip_grad_norm_(optimizer, limit)
        torch.testing.assert_close(found, torch.tensor(norm))
    optimizer.step()
    assert_moved(parameters, 0.25)


def forget_by_hand(parameters):
    for parameter in parameters:
        parameter.grad = None


def forget_in_the_module(parameters):
    module = nn.Module()
    module.first, module.second = parameters
    module.zero_grad()


@pytest.mark.parametrize("forget", [forget_by_hand, forget_in_the_module])
def test_gradients_that_replaced_the_clipped_ones_are_not_scaled_and_that_is_said(forget):
    parameters, optimizer = run()
    torch_bf16.clip_grad_norm_(optimizer, 1.0, skip_nonfinite=True)
    forget(parameters)
    give(parameters, 0.5)
    with pytest.warns(UserWarning, match="clipped and then replaced before a step read them"):
        optimizer.step()
    assert_moved(parameters, 0.5)
    optimizer.step()
    assert_moved(parameters, 1.0)


def test_a_gradient_that_stays_keeps_the_promise():
    parameters, optimizer = run()
    torch_bf16.clip_grad_norm_(optimizer, 1.0)
    parameters[0].grad = None
    optimizer.step()
    assert_moved(parameters[1:], 0.25)
