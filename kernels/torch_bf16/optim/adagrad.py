"""RMSprop and Adagrad with ``torch.optim``'s signatures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_bf16 import rules
from torch_bf16.engine.states import States
from torch_bf16.recipe import Recipe
from torch_bf16.rules import Rule

from .optimizer import BF16Optimizer

__all__ = ["Adagrad", "RMSprop"]


class RMSprop(BF16Optimizer, torch.optim.RMSprop):
    """RMSprop (Tieleman & Hinton, 2012), also centered or with momentum, stored by a recipe.

    The momentum buffer has the recipe's ``exp_avg`` format, the mean of squares its ``exp_avg_sq``
    format. See :mod:`torch_bf16.rules.rmsprop` for the equations.

    Differs from torch.optim: with ``centered`` both means are fp32 in every recipe, and a variance
    that rounding makes negative counts as zero, where torch gets NaN. ``foreach`` is accepted and
    ignored; ``differentiable`` is refused.

    Args:
        params: as for :class:`AdamW`, as are errors and all arguments not listed here.
        alpha: decay rate of the means.
        eps: added to the square root.
        weight_decay: multiplied by the weight and added to the gradient.
        momentum: decay rate of the momentum buffer; 0 keeps none.
        centered: divide by the gradient's standard deviation, not by its root mean square.

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
        release: bool | Mapping[str, Any] = False,
    ) -> None:
        self._construct(locals())

    def rule_of_group(self, group: dict[str, Any]) -> Rule:
        momentum = group["momentum"]
        if group["centered"]:
            return rules.RMSPROP_CENTERED_MOMENTUM if momentum else rules.RMSPROP_CENTERED
        return rules.RMSPROP_MOMENTUM if momentum else rules.RMSPROP


class Adagrad(BF16Optimizer, torch.optim.Adagrad):
    """Adagrad (Duchi et al., 2011), whose numbers are stored by a recipe.

    The sum of squared gradients has the recipe's ``exp_avg_sq`` format. See
    :mod:`torch_bf16.rules.adagrad` for the equations.

    Differs from torch.optim: there is no state before the first step, and a group added later may
    have its own ``initial_accumulator_value``; gradients must be dense; ``foreach`` and ``fused``
    are accepted and ignored; ``differentiable`` and ``share_memory()`` are refused.

    Args:
        params: as for :class:`AdamW`, as are errors and all arguments not listed here.
        lr_decay: divides the learning rate by ``1 + (step - 1) * lr_decay``.
        weight_decay: multiplied by the weight and added to the gradient.
        initial_accumulator_value: what the sum of squared gradients starts from.
        eps: added to the square root of the sum.

    Example:
        >>> optimizer = torch_bf16.Adagrad(model.parameters(), lr=1e-2)
    """

    torch_class = torch.optim.Adagrad
    _rule = rules.ADAGRAD

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
        release: bool | Mapping[str, Any] = False,
    ) -> None:
        self._construct(locals())
        # Drop the state that some versions of torch make here, in the parameters' dtype.
        self.state = States(dict)

    def share_memory(self) -> None:
        """Refuse to share the states with other processes, which torch's class does.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "share_memory() of Adagrad is not supported by torch_bf16: states are made in the "
            "first step, by each process for itself, and processes that stepped over the same "
            "memory would overwrite one another's. Train with DDP, or with torch.optim.Adagrad"
        )
