"""The examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import accelerate_bf16

MODULES = ["accelerate_bf16"] + [
    name for _, name, _ in pkgutil.walk_packages(accelerate_bf16.__path__, "accelerate_bf16.")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name):
    model = torch.nn.Linear(4, 4)
    names = {"model": model, "x": torch.randn(2, 4), "nn": torch.nn}
    names["optimizer"] = torch.optim.AdamW(model.parameters())
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
