"""What the hidden programs of docs/cookbook share; a page executes this file's text."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import torch

import torch_bf16


def make_model() -> torch.nn.Sequential:
    """The same small model each time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))


def train(model: torch.nn.Module, optimizer: Any, steps: int = 3) -> str:
    """Train some steps with an optimizer that has to be ours.

    Args:
        model: of `make_model`, with bf16 weights.
        optimizer: over its parameters, made by another library.
        steps: how many.

    Returns:
        The name of the recipe.
    """
    x = torch.randn(8, 32, dtype=torch.bfloat16)
    for _ in range(steps):
        loss = (model(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert type(optimizer).__module__.startswith("torch_bf16.")
    return torch_bf16.describe(model, optimizer).recipe


def bare(*names: str) -> None:
    """Import packages without what their __init__ imports.

    Args:
        names: of the packages, those that contain others first.
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        package = sys.modules[name] = types.ModuleType(name)
        package.__spec__ = spec
        package.__path__ = [*(spec.submodule_search_locations or ())]
