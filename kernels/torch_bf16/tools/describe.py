"""Saying where the bytes are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from torch_bf16.backends import name_of_chosen
from torch_bf16.optim import BF16Optimizer
from torch_bf16.recipe import Recipe, get_recipe
from torch_bf16.rules import ADAMW, State
from torch_bf16.sharding.fsdp1 import whole_numel

__all__ = ["describe"]


def describe(module: nn.Module | Iterable[nn.Module], recipe: BF16Optimizer | Recipe | str) -> str:
    """One line: mode, dtypes, bytes per parameter, backend.

    Args:
        module: one module or several, cast already.
        recipe: the optimizer that will train it, or a recipe, for which AdamW is assumed.

    Returns:
        For example ``"true-bf16-stochastic: 1.2 M parameters (1.2 M bfloat16), 8.00 bytes per
        trained parameter (weights 2.00, gradients 2.00, exp_avg 2.00, exp_avg_sq 2.00), backend
        cpu"``.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    parameters = list({id(p): p for each in modules for p in each.parameters()}.values())
    states: tuple[State, ...] = ADAMW.states
    backend, released = None, False
    if isinstance(recipe, BF16Optimizer):
        released = recipe._release is not None
        rule = recipe.rule_of(recipe.param_groups[0])
        states = (*rule.states, *(each for each in rule.stage_states if each.shape is None))
        backend, recipe = recipe.backend, recipe.recipe
    recipe = get_recipe(recipe)
    dtypes: Counter[str] = Counter()
    sizes: defaultdict[str, float] = defaultdict(float)
    trained = 0
    for p in parameters:
        numel = whole_numel(p)
        dtypes[str(p.dtype).removeprefix("torch.")] += numel
        if p.requires_grad and p.dtype in (torch.bfloat16, torch.float32):
            trained += numel
            sizes["weights"] += numel * recipe.format_of("weights", p).bytes_per_element
            gradient = numel * (4 if recipe.accumulate == "fp32" else p.element_size())
            # Of released gradients one lives at a time.
            before = sizes["gradients"]
            sizes["gradients"] = max(before, gradient) if released else before + gradient
            for state in states:
                size = recipe.format_of(state.role, p).bytes_per_element
                sizes[state.name] += numel * size
    line = f"{recipe.name}: {_count(sum(dtypes.values()))} parameters ("
    line += ", ".join(f"{_count(n)} {dtype}" for dtype, n in dtypes.items()) + ")"
    if trained:
        each = ", ".join(f"{name} {size / trained:.2f}" for name, size in sizes.items())
        total = sum(sizes.values()) / trained
        line += f", {total:.2f} bytes per trained parameter ({each})"
    if parameters:
        line += f", backend {name_of_chosen(parameters[0].device, backend)}"
    return line


def _count(n: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return str(n)
