"""What is measured: an optimizer that stores its numbers in one way; ours in each recipe."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torch_bf16.recipe import RECIPES, Recipe, get_recipe

from .models import Shapes

__all__ = ["OPTIONS", "OURS", "Entry", "ours"]

# The same for all, so that no one gains by skipping a term.
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True)
class Entry:
    """One optimizer with one way to store its numbers.

    Attributes:
        name: in tables.
        stores: what it keeps of weights and moments, in words.
        target: its class, ``"module:name"``, called with parameters, ``arguments`` and
            ``options``.
        estimate: bytes per parameter, weights and gradients included, by which it is decided what
            fits into memory together. Generous: what is reported is measured.
        options: more arguments of the class.
        arguments: hyperparameters; those that all share unless told otherwise.
        attributes: set on the optimizer.
        dtype: of weights and gradients.
        scratch: bytes per element of the largest tensor that a step needs for a moment, likewise.
        compiles: its first step runs ``torch.compile``.
        only_on: the device type that it needs, None for any.
        way: how its steps are taken, one of ``WAYS``; None for gradients that stay where they are.
        needs: a library beside its peer's: what is imported, and what is installed.
    """

    name: str
    stores: str
    target: str
    estimate: float
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=lambda: OPTIONS)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    scratch: float = 32
    compiles: bool = False
    only_on: str | None = None
    way: str | None = None
    needs: tuple[str, str] | None = None

    @property
    def installed(self) -> bool:
        """Whether what it needs can be found; importing it may still fail."""
        return self.needs is None or importlib.util.find_spec(self.needs[0]) is not None

    def make(self, shapes: Shapes, device: torch.device) -> torch.optim.Optimizer:
        """The optimizer over parameters of these shapes, each with a gradient."""
        # A block repeated: normal numbers for a billion parameters would take a CPU a minute. And
        # written in place: a temporary of the largest tensor would be part of a measured peak.
        block = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).to(device)
        # Scaled once: freed between small tensors that live on, each copy would leave a hole.
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
        """The optimizer over these parameters, with other hyperparameters than its own."""
        module, name = self.target.split(":")
        cls = getattr(importlib.import_module(module), name)
        optimizer = cls(parameters, **arguments, **self.options)
        for attribute, value in self.attributes.items():
            setattr(optimizer, attribute, value)
        return optimizer


def _fill(tensor: Tensor, block: Tensor) -> None:
    for part in tensor.view(-1).split(len(block)):
        part.copy_(block[: len(part)])


OURS = tuple(recipe.name for recipe in dict.fromkeys(RECIPES.values()))
"""Names of our entries: those of the recipes."""


def ours(names: Sequence[str | Recipe], backend: str | None = None) -> tuple[Entry, ...]:
    """Our AdamW in each of these recipes.

    Args:
        names: of recipes, or recipes; aliases count as what they stand for.
        backend: None for the one that is chosen for the device.
    """
    recipes = [get_recipe(name) for name in names]
    return tuple(
        Entry(
            recipe.name,
            f"weights {recipe.weights}, moments {recipe.exp_avg} / {recipe.exp_avg_sq}",
            "torch_bf16:AdamW",
            # Vectors keep masters and fp32 moments; there are few of them.
            estimate=2.1 + recipe.bytes_per_parameter,
            options={"recipe": recipe},
            attributes={"backend": backend},
            scratch=0 if backend != "eager" else 48,
        )
        for recipe in dict.fromkeys(recipes)
    )
