"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
import torch

import torch_bf16
from torch_bf16 import plugin_api
from torch_bf16.backends import explain

# The Triton that an older torch brings along cannot import them.
LEFT_OUT = ("torch_bf16.backends.triton.",) if explain(torch.device("cuda"))["triton"] else ()
MODULES = [
    name
    for finder, name, _ in pkgutil.walk_packages(torch_bf16.__path__, "torch_bf16.")
    if not name.endswith("__main__")
    and not name.startswith(LEFT_OUT)
    and ">>> " in Path(finder.find_spec(name).origin).read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name):
    model = torch.nn.Linear(4, 4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    names = {"torch": torch, "torch_bf16": torch_bf16, "plugin_api": plugin_api, "model": model}
    names["optimizer"] = torch_bf16.AdamW(model.parameters())
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    examples = [
        test
        for name in MODULES
        for test in finder.find(importlib.import_module(name))
        if test.examples
    ]
    assert len(examples) >= 8
