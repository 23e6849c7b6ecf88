"""SGD with the signature of ``torch.optim``'s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_bf16 import rules
from torch_bf16.recipe import Recipe
from torch_bf16.rules import Rule

from .optimizer import BF16Optimizer

__all__ = ["SGD"]


class SGD(BF16Optimizer, torch.optim.SGD):
    """SGD with momentum, dampening and Nesterov's variant, whose numbers are stored by a recipe.

    The momentum buffer has the recipe's ``exp_avg`` format.

    Differs from torch.optim: the state also counts ``step``, which keys the rounding noise;
    ``foreach`` and ``fused`` are accepted and ignored; ``differentiable`` is refused.

    Args:
        params: as for :class:`AdamW`, as are errors and all arguments not listed here.
        momentum: decay rate of the momentum buffer; 0 keeps none.
        dampening: share of the gradient that does not enter the buffer, from the parameter's second
            step on; in torch from its second step with momentum, which may be switched on later.
        weight_decay: multiplied by the weight and added to the gradient.
        nesterov: look ahead along the momentum.

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
        release: bool | Mapping[str, Any] = False,
    ) -> None:
        self._construct(locals())

    def rule_of_group(self, group: dict[str, Any]) -> Rule:
        if not group["momentum"]:
            return rules.SGD
        return rules.SGD_NESTEROV if group["nesterov"] else rules.SGD_MOMENTUM
