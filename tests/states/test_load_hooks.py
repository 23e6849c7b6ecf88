"""Errors of users' hooks, which run when a state dict has been loaded."""

import pytest
import torch
from torch import nn

import torch_bf16


def stepped(steps):
    weight = nn.Parameter(torch.ones(4, 4).bfloat16())
    optimizer = torch_bf16.AdamW([weight], lr=0.1)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return optimizer, weight


def test_an_error_of_a_hook_after_the_load_does_not_say_that_nothing_was_changed():
    saved, (optimizer, weight) = stepped(3)[0].state_dict(), stepped(1)

    def after(optimizer):
        raise ValueError("my hook")

    optimizer.register_load_state_dict_post_hook(after)
    with pytest.raises(ValueError, match=r"^my hook$"):
        optimizer.load_state_dict(saved)
    assert optimizer.state[weight]["step"] == 3
    with pytest.raises(ValueError, match="No state was changed"):
        optimizer.load_state_dict({})
