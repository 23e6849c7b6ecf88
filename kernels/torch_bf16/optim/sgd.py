"""SGD with ``torch.optim``'s signature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_bf16.recipe import Recipe
from torch_bf16.rules import SGD as PLAIN
from torch_bf16.rules import SGD_MOMENTUM, SGD_NESTEROV, Rule

from .optimizer import BF16Optimizer

__all__ = ["SGD"]


class SGD(BF16Optimizer, torch.optim.SGD):
    """SGD with momentum, dampening and Nesterov's variant, whose numbers are stored by a recipe.

    The momentum buffer has the recipe's ``exp_avg`` format.

    Differs from torch.optim: the state also counts ``step``, which keys the rounding noise;
    ``foreach`` and ``fused`` are accepted and change nothing; ``differentiable`` is refused.

    Args:
        params: as for :class:`AdamW`, like all arguments but these:
        momentum: decay rate of the momentum buffer; 0 keeps none.
        dampening: share of the gradient that does not enter the buffer, from the second step on.
        weight_decay: multiplied by the weight and added to the gradient.
        nesterov: look ahead along the momentum.

    Raises:
        ValueError: the recipe or the backend is unknown, or a parameter is neither bf16 nor fp32.

    Example:
        >>> optimizer = torch_bf16.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    """

    torch_class = torch.optim.SGD

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        recipe: str | Recipe = "bf16-stochastic",
        backend: str | None = None,
    ) -> None:
        self._construct(locals())

    def rule_of(self, group: dict[str, Any]) -> Rule:
        if not group["momentum"]:
            return PLAIN
        return SGD_NESTEROV if group["nesterov"] else SGD_MOMENTUM
