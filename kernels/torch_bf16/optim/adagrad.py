"""Adagrad with ``torch.optim``'s signature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_bf16.recipe import Recipe
from torch_bf16.rules import ADAGRAD, Rule

from .optimizer import BF16Optimizer

__all__ = ["Adagrad"]


class Adagrad(BF16Optimizer, torch.optim.Adagrad):
    """Adagrad (Duchi et al., 2011), whose numbers are stored by a recipe.

    The sum of squared gradients has the recipe's ``exp_avg_sq`` format. See
    :mod:`torch_bf16.rules.adagrad` for the equations.

    Differs from torch.optim: there is no state before the first step, and a group added later may
    have its own ``initial_accumulator_value``; gradients must be dense; ``foreach`` and ``fused``
    are accepted and change nothing; ``differentiable`` is refused.

    Args:
        params: as for :class:`AdamW`, like all arguments but these:
        lr_decay: divides the learning rate by ``1 + (step - 1) * lr_decay``.
        weight_decay: multiplied by the weight and added to the gradient.
        initial_accumulator_value: what the sum of squared gradients starts from.
        eps: added to the root of the sum.

    Raises:
        ValueError: an argument is out of range, or a parameter is neither bf16 nor fp32.

    Example:
        >>> optimizer = torch_bf16.Adagrad(model.parameters(), lr=1e-2)
    """

    torch_class = torch.optim.Adagrad

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        recipe: str | Recipe = "bf16-stochastic",
        backend: str | None = None,
    ) -> None:
        self._construct(locals())
        # Some versions of torch make the state here, in the parameters' dtype.
        self.state.clear()

    def rule_of(self, group: dict[str, Any]) -> Rule:
        return ADAGRAD
