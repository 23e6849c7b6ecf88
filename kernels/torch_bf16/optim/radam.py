"""RAdam with ``torch.optim``'s signature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_bf16.recipe import Recipe
from torch_bf16.rules import RADAM, Rule

from .optimizer import BF16Optimizer

__all__ = ["RAdam"]


class RAdam(BF16Optimizer, torch.optim.RAdam):
    """RAdam (Liu et al., 2020), Adam that warms itself up, whose numbers are stored by a recipe.

    See :mod:`torch_bf16.rules.radam` for the equations.

    Differs from torch.optim as :class:`AdamW` does.

    Args:
        params: as for :class:`AdamW`, like all arguments but these:
        weight_decay: multiplied by the weight and added to the gradient, unless decoupled.
        decoupled_weight_decay: decay as AdamW does.

    Raises:
        ValueError: an argument is out of range, or a parameter is neither bf16 nor fp32.

    Example:
        >>> optimizer = torch_bf16.RAdam(model.parameters(), lr=1e-3)
    """

    torch_class = torch.optim.RAdam

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fully_decoupled_weight_decay: bool | float = False,
        recipe: str | Recipe = "bf16-stochastic",
        backend: str | None = None,
    ) -> None:
        self._construct(locals())

    def rule_of(self, group: dict[str, Any]) -> Rule:
        return RADAM
