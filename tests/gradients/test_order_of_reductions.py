"""Ranks reduce norms in one order, whichever of them have which gradients."""

import pytest
import torch
from torch import nn

from torch_bf16.gradients import norm


class Shard:
    """Part of a parameter; its name stands for the ranks that hold the other parts."""

    in_row = True

    def __init__(self, parameter):
        self.parameter = parameter

    def groups(self):
        return [self.parameter.held_with]

    def gradient(self):
        return self.parameter.grad


@pytest.mark.parametrize("without", ["", "A", "B", "AB"])
def test_groups_come_in_the_order_of_parameters_with_and_without_gradients(monkeypatch, without):
    monkeypatch.setattr(norm, "shard_of", Shard)
    monkeypatch.setattr(norm, "all_whole", lambda _: False)
    parameters = []
    for name in "ABA":
        parameter = nn.Parameter(torch.ones(4).bfloat16())
        parameter.held_with = name
        parameter.grad = None if name in without else torch.ones(4).bfloat16()
        parameters.append(parameter)
    norms = norm.norms_of(parameters)
    assert [*norms] == [("A",), ("B",)]
    for (name,), parts in norms.items():
        expected = 0.0 if name in without else 2.0 * (2**0.5 if name == "A" else 1.0)
        assert torch.linalg.vector_norm(torch.stack(parts).float()).item() == pytest.approx(
            expected
        )
