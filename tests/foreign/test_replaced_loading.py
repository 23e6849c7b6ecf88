"""A ``load_state_dict`` that a program has put on an optimizer before it is converted."""

import functools
import types
from unittest import mock

import pytest
import torch

from torch_bf16 import convert


@pytest.mark.parametrize(
    "load",
    [
        lambda o: functools.partial(o.load_state_dict),
        lambda o: functools.partial(torch.optim.AdamW.load_state_dict, o),
        lambda o: lambda state_dict, load=o.load_state_dict: load(state_dict),
        lambda o: types.MethodType(lambda _, saved, load=o.load_state_dict: load(saved), o),
    ],
)
def test_other_ways_to_keep_the_old_loading_are_refused_too(load):
    optimizer = torch.optim.AdamW(torch.nn.Linear(4, 4).parameters())
    optimizer.load_state_dict = load(optimizer)
    with pytest.raises(NotImplementedError, match="load_state_dict method of this AdamW"):
        convert(optimizer, "bf16-fp32-master")


def test_loading_that_does_not_keep_the_old_method_is_left_alone():
    def empty(optimizer):
        def load(state_dict):
            return later(optimizer, state_dict)

        return load
        later = None  # so that its cell is empty

    for make in (empty, lambda optimizer: mock.Mock()):
        optimizer = torch.optim.AdamW(torch.nn.Linear(4, 4).parameters())
        optimizer.load_state_dict = make(optimizer)
        convert(optimizer, "bf16-fp32-master")
