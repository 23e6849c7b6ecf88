"""Where the bytes of a training run go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_bf16.argument_checks import check_module
from torch_bf16.backends import choose
from torch_bf16.engine.wrappers import held_optimizers
from torch_bf16.errors import BackendUnavailableError, with_article
from torch_bf16.foreign.optimizer import ForeignOptimizer
from torch_bf16.gradients.gathering import most_at_once
from torch_bf16.optim.optimizer import BF16Optimizer
from torch_bf16.parameters import parameters_in
from torch_bf16.recipe import Recipe, get_recipe
from torch_bf16.rules import ADAMW, Rule
from torch_bf16.sharding import shard_of
from torch_bf16.states.views import MASTERS

__all__ = ["Description", "describe"]


@dataclass(frozen=True)
class Description:
    """What is trained, in which formats, and how many bytes that takes; ``str()`` is one line.

    Attributes:
        recipe: the recipe's ``label``: its name, with the formats that were changed in it.
        parameters: elements by dtype, including those on other ranks; a complex number counts as
            two.
        trained: elements of the parameters that require a gradient and have a dtype that can be
            trained.
        bytes_by_role: bytes per trained element: ``"weights"``, ``"gradients"`` and each state.
        backend: the backend that takes the steps; None if there are no parameters, or if the one
            that was asked for cannot run where they are now. Before the first step it is the one
            that is tried first; kernels that fail their proof then go to another, ``"eager and
            triton"`` if only some of them fail.
        unmade: the optimizer class whose first step will create states, which are not counted; None
            if the states are known.
        compute: what the model computes in, as in :class:`torch_bf16.Recipe`.
        offload: what is kept in host memory, as in :class:`torch_bf16.Recipe`.
        divided: how an attached DeepSpeed engine divides that between processes; None without one.
    """

    recipe: str
    parameters: Mapping[str, int]
    trained: int
    bytes_by_role: Mapping[str, float]
    backend: str | None
    unmade: str | None = None
    compute: str = "autocast"
    offload: str = "none"
    divided: str | None = None

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes per trained element, of all roles together."""
        return sum(self.bytes_by_role.values())

    def __str__(self) -> str:
        dtypes = ", ".join(f"{_count(n)} {dtype}" for dtype, n in self.parameters.items())
        line = f"{self.recipe}: {_count(sum(self.parameters.values()))} parameters ({dtypes})"
        if self.trained:
            each = ", ".join(f"{role} {size:.2f}" for role, size in self.bytes_by_role.items())
            bytes_ = f"{self.bytes_per_parameter:.2f} bytes"
            if self.unmade is not None:
                each += f", and the states that the first step of {self.unmade} makes"
                bytes_ = f"more than {bytes_}"
            line += f", {bytes_} per trained parameter ({each})"
        if self.compute != "autocast":
            line += f", computes in {self.compute}"
        if self.offload != "none":
            line += f", {self.offload} in host memory"
        if self.backend is not None:
            line += f", backend {self.backend}"
        return line if self.divided is None else f"{line}; {self.divided}"


def describe(
    model: nn.Module | Iterable[nn.Module], optimizer_or_recipe: BF16Optimizer | Recipe | str
) -> Description:
    """Recipe, dtypes, bytes per parameter and backend of a training run.

    Args:
        model: one model or several, already cast.
        optimizer_or_recipe: the optimizer that will train it, or a recipe, which AdamW will use.

    Raises:
        ValueError: the second argument is neither, or no recipe has that name.

    Example:
        >>> found = torch_bf16.describe(torch_bf16.cast_model(torch.nn.Linear(64, 64)), optimizer)
        >>> print(found)
        bf16-stochastic: 4.2 k parameters (4.2 k bfloat16), 8.09 bytes per trained parameter ...
        >>> found.parameters, found.bytes_by_role["gradients"]
        ({'bfloat16': 4160}, 2.0)
    """
    models = [model] if isinstance(model, nn.Module) else model
    models = [*models] if isinstance(models, Iterable) else [models]
    for each in models:
        check_module("describe", each)
    parameters = list({id(p): p for each in models for p in parameters_in(each)}.values())
    optimizer, recipe, backend = _asked(optimizer_or_recipe)
    rules: dict[Tensor, Rule] = {}
    if optimizer is not None:
        rules = {
            p: optimizer.rule_of_parameter(group, p)
            for group in optimizer.param_groups
            for p in group["params"]
        }
    # A parameter in no group is counted as if it belonged to the first one.
    default_rule = next(iter(rules.values()), ADAMW)
    sizes: dict[str, float] = {"weights": 0.0, "gradients": 0.0}
    dtypes: Counter[str] = Counter()
    trained, largest = 0, 0.0
    for p in parameters:
        shard = shard_of(p)
        numel = shard.numel
        dtypes[str(p.dtype).removeprefix("torch.")] += numel
        if p.requires_grad and p.dtype in (torch.bfloat16, torch.float32, torch.complex64):
            trained += numel
            narrow = p.dtype == torch.bfloat16 and recipe.accumulate != "fp32"
            gradient = numel * (2 if narrow else 4)
            largest = max(largest, gradient)
            sizes["gradients"] += gradient
            for name, role in _roles(rules.get(p, default_rule)).items():
                format_ = recipe.format_of(role, shard.shape, p.dtype)
                sizes[name] = sizes.get(name, 0.0) + numel * format_.bytes_per_element
    if optimizer is not None and optimizer._engine.release is not None:
        sizes["gradients"] = most_at_once(sizes["gradients"], largest)
    unmade = None
    if isinstance(optimizer, ForeignOptimizer):
        held = _held(optimizer, parameters)
        unmade = type(optimizer).__name__ if not held and trained else None
        sizes |= held
    return Description(
        unmade=unmade,
        compute=recipe.compute,
        offload=recipe.offload,
        divided=None if optimizer is None else optimizer._engine.divided,
        recipe=recipe.label,
        parameters=dict(dtypes),
        trained=trained,
        bytes_by_role={name: size / trained for name, size in sizes.items() if trained},
        backend=_backend_for(parameters, optimizer, backend),
    )


def _asked(argument: Any) -> tuple[BF16Optimizer | None, Recipe, str | None]:
    """The optimizer, if one was passed, the recipe, and the name of the backend, if one was."""
    if isinstance(argument, BF16Optimizer):
        return argument, argument.recipe, argument.backend
    if isinstance(argument, (str, Recipe)):
        recipe = get_recipe(argument)
        return None, recipe, recipe.backend
    if held := held_optimizers(argument):
        raise ValueError(
            f"describe was given {with_article(argument)}, which holds {with_article(held[0])} of "
            "torch_bf16: pass the one inside, or a recipe. In ZeroRedundancyOptimizer it is "
            "zero.optim; parameters that other ranks step count as if they were in its first group"
        )
    raise ValueError(
        "describe takes one optimizer that was prepared or converted, or else a recipe or its "
        f"name, not {type(argument).__name__}. Of several optimizers describe each with the "
        "modules that it trains: describe([model.head], head_optimizer)"
    )


def _backend_for(
    parameters: list[nn.Parameter], optimizer: BF16Optimizer | None, asked: str | None
) -> str | None:
    if not parameters:
        return None
    plan = None if optimizer is None else optimizer._engine.plan
    if plan is not None and parameters[0].device in plan.devices:
        return " and ".join(plan.backends)
    try:
        return choose(parameters[0].device, asked).name
    except BackendUnavailableError:  # the model may be on its way to another device
        return None


def _roles(rule: Rule) -> dict[str, str]:
    """Roles of the weight and of the states, by name; without states much smaller than a matrix."""
    states = (each for each in (*rule.states, *rule.stage_states) if each.shape is None)
    return {"weights": "weights", **{each.name: each.role for each in states}}


def _held(optimizer: BF16Optimizer, parameters: Iterable[Tensor]) -> dict[str, float]:
    """Bytes of the states that an optimizer without a rule has created, by name."""
    sizes: Counter[str] = Counter()
    for p in parameters:
        for key, each in optimizer.state.get(p, {}).items():
            # Every class counts steps, and the count is no larger for a large tensor.
            if isinstance(each, Tensor) and key not in MASTERS and key != "step":
                sizes[key] += each.numel() * each.element_size()
    return dict(sizes)


def _count(n: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        # What would be rounded to 1000.0 of the smaller unit is 1.0 of this one.
        if n >= 0.99995 * size:
            return f"{n / size:.1f} {unit}"
    return str(n)
