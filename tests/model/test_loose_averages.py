"""The search for averages that belong to no module."""

import gc

import torch
from torch import nn

import torch_bf16
from torch_bf16.model.loose_averages import loose_averages


def refused():
    raise AssertionError("it also gives tuples that other threads are still filling")


def test_an_average_is_found_among_thousands_of_tensors_and_beside_zeros(
    monkeypatch,
):
    monkeypatch.setattr(gc, "get_objects", refused)
    others = torch.randn(5000, 32, 32).bfloat16().unbind()
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    nn.init.zeros_(model[0].weight)
    weights = [*torch_bf16.cast_model(model).parameters()]
    averages = [each.detach() * 1.01 for each in weights]
    (found,) = loose_averages(weights, [], 4)
    assert found.name == "1.weight"
    assert found.get() is averages[2]
    assert len(others) == 5000


def test_an_average_that_the_collector_has_put_aside_is_found(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)  # which tests/conftest.py hides
    model = torch_bf16.cast_model(nn.Linear(41, 37, bias=False))  # of a shape of its own
    averages = {"weight": model.weight.detach() * 1.01}
    gc.freeze()
    (found,) = loose_averages([model.weight], [], 4)
    averages["weight"] = averages["weight"] * 1.01
    assert found.get() is averages["weight"]
