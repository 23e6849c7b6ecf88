"""RMSprop with ``torch.optim``'s signature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_bf16.recipe import Recipe
from torch_bf16.rules import (
    RMSPROP,
    RMSPROP_CENTERED,
    RMSPROP_CENTERED_MOMENTUM,
    RMSPROP_MOMENTUM,
    Rule,
)

from .optimizer import BF16Optimizer

__all__ = ["RMSprop"]


class RMSprop(BF16Optimizer, torch.optim.RMSprop):
    """RMSprop (Tieleman & Hinton, 2012), with momentum and centered, stored by a recipe.

    The momentum buffer has the recipe's ``exp_avg`` format, the mean of squares its ``exp_avg_sq``
    format. See :mod:`torch_bf16.rules.rmsprop` for the equations.

    Differs from torch.optim: with ``centered`` both means are fp32 in every recipe, and a variance
    that rounding makes negative counts as zero, where torch goes on with NaN. ``foreach`` and
    ``capturable`` are accepted and change nothing; ``differentiable`` is refused.

    Args:
        params: as for :class:`AdamW`, like all arguments but these:
        alpha: decay rate of the means.
        eps: added to the root.
        weight_decay: multiplied by the weight and added to the gradient.
        momentum: decay rate of the momentum buffer; 0 keeps none.
        centered: divide by the standard deviation of the gradient, not by the root of its square.
        capturable: ignored.

    Raises:
        ValueError: an argument is out of range, or a parameter is neither bf16 nor fp32.

    Example:
        >>> optimizer = torch_bf16.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
    """

    torch_class = torch.optim.RMSprop

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        *,
        recipe: str | Recipe = "bf16-stochastic",
        backend: str | None = None,
    ) -> None:
        self._construct(locals())

    def rule_of(self, group: dict[str, Any]) -> Rule:
        if group["centered"]:
            return RMSPROP_CENTERED_MOMENTUM if group["momentum"] else RMSPROP_CENTERED
        return RMSPROP_MOMENTUM if group["momentum"] else RMSPROP
