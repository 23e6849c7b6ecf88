"""Entries of the benchmark: optimizers that each store their numbers in one way; ours by recipe."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_bf16.recipe import RECIPES, Recipe, get_recipe

from .models import Shapes

__all__ = ["OPTIONS", "OURS", "Entry", "of_recipe", "ours"]

# The same for all entries, so that none gains by skipping a term.
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
_EAGER_SCRATCH = 48


@dataclass(frozen=True)
class Entry:
    """One optimizer with one way to store its numbers.

    Attributes:
        name: its name in tables.
        stores: the formats of its weights and moments, in words.
        target: its class, ``"module:name"``, called with parameters, ``arguments`` and
            ``options``.
        estimate: bytes per parameter, weights and gradients included, which decide what fits into
            memory together. A generous estimate: reported bytes are measured.
        options: more arguments of the class.
        arguments: hyperparameters; by default those that all entries share.
        dtype: the dtype of weights and gradients.
        scratch: bytes that a step needs temporarily, per element of the largest tensor; a generous
            estimate, too.
        compiles: whether its first step runs ``torch.compile``.
        only_on: the device type that it needs; None for any.
        way: how its steps are taken, one of ``WAYS``; None for gradients that stay where they are.
        needs: a library that it needs beside its peer's: the module's name, and the package's.
        is_ours: whether the optimizer is one of this package.
    """

    name: str
    stores: str
    target: str
    estimate: float
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=lambda: OPTIONS)
    dtype: torch.dtype = torch.bfloat16
    scratch: float = 32
    compiles: bool = False
    only_on: str | None = None
    way: str | None = None
    needs: tuple[str, str] | None = None
    is_ours: bool = False

    @property
    def installed(self) -> bool:
        """Whether the library that it needs can be found; importing it may still fail."""
        return self.needs is None or importlib.util.find_spec(self.needs[0]) is not None

    def on_backend(self, backend: str | None) -> Entry:
        """The same with this backend, None for the one of the device, if it is one of ours."""
        if not self.is_ours:
            return self
        scratch = _EAGER_SCRATCH if backend == "eager" else 0
        return replace(self, options={**self.options, "backend": backend}, scratch=scratch)

    def make(self, shapes: Shapes, device: torch.device) -> torch.optim.Optimizer:
        """Make the optimizer over parameters of these shapes, each with a gradient."""
        # One block, repeated: normal numbers for a billion parameters would take a CPU a minute. It
        # is copied in place: a temporary of the largest tensor would be part of a measured peak.
        block = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).to(device)
        # Scaled once: a copy for each tensor, freed between tensors that stay, would leave a hole.
        weights, gradients = block * 0.02, block.flip(0) * 1e-3
        parameters = []
        for shape in shapes:
            parameter = nn.Parameter(torch.empty(shape, dtype=self.dtype, device=device))
            parameter.grad = torch.empty_like(parameter)
            _fill(parameter.detach(), weights)
            _fill(parameter.grad, gradients)
            parameters.append(parameter)
        return self.over(parameters, self.arguments)

    def over(
        self, parameters: Sequence[Tensor], arguments: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        """Make the optimizer over these parameters, with other hyperparameters than its own."""
        module, name = self.target.split(":")
        cls = getattr(importlib.import_module(module), name)
        return cls(parameters, **arguments, **self.options)


def _fill(tensor: Tensor, block: Tensor) -> None:
    for part in tensor.view(-1).split(len(block)):
        part.copy_(block[: len(part)])


OURS = tuple(RECIPES)
"""Names of our entries: those of the recipes."""


def ours(names: Sequence[str | Recipe], backend: str | None = None) -> tuple[Entry, ...]:
    """Our AdamW in each of these recipes.

    Args:
        names: names of recipes, or recipes; one that is named twice counts once.
        backend: None for the one that is chosen for the device.
    """
    recipes = dict.fromkeys(get_recipe(name) for name in names)
    return tuple(of_recipe(each.name, each, backend) for each in recipes)


def of_recipe(
    name: str, recipe: Recipe, backend: str | None, optimizer: str = "AdamW", **attributes: Any
) -> Entry:
    """One of our optimizers in a recipe; ``attributes`` are further ones of :class:`Entry`."""
    return Entry(
        name,
        f"weights {recipe.weights}, moments {recipe.exp_avg} / {recipe.exp_avg_sq}",
        f"torch_bf16:{optimizer}",
        # Vectors keep masters and fp32 moments; there are few of them.
        estimate=2.1 + recipe.bytes_per_parameter,
        options={"recipe": recipe},
        is_ours=True,
        **attributes,
    ).on_backend(backend)
