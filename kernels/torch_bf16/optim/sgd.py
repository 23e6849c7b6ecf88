"""SGD, RMSprop and Adagrad with ``torch.optim``'s signatures, and Lion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_bf16 import rules
from torch_bf16.argument_checks import check_ranges
from torch_bf16.engine.states import States
from torch_bf16.recipe import Recipe
from torch_bf16.rules import Rule

from .optimizer import BF16Optimizer
from .variants import OF_LION, variant_of

__all__ = ["SGD", "Adagrad", "Lion", "RMSprop"]


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


class RMSprop(BF16Optimizer, torch.optim.RMSprop):
    """RMSprop (Tieleman & Hinton, 2012), also centered or with momentum, stored by a recipe.

    The momentum buffer has the recipe's ``exp_avg`` format, the mean of squares its ``exp_avg_sq``
    format. See :mod:`torch_bf16.rules.rmsprop` for the equations.

    Differs from torch.optim: with ``centered`` both means are fp32 in every recipe, and a variance
    that rounding makes negative counts as zero, where torch gets NaN. ``foreach`` and
    ``capturable`` are accepted and ignored; ``differentiable`` is refused.

    Args:
        params: as for :class:`AdamW`, as are errors and all arguments not listed here.
        alpha: decay rate of the means.
        eps: added to the square root.
        weight_decay: multiplied by the weight and added to the gradient.
        momentum: decay rate of the momentum buffer; 0 keeps none.
        centered: divide by the gradient's standard deviation, not by its root mean square.
        capturable: ignored.

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
    are accepted and ignored; ``differentiable`` is refused.

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

    def rule_of_group(self, group: dict[str, Any]) -> Rule:
        return rules.ADAGRAD


class Lion(BF16Optimizer):
    """Lion (Chen et al., 2023): steps of one size along the sign of a momentum.

    It keeps one state, so that ``bf16-stochastic`` takes 6 bytes per parameter with a bf16
    gradient. See :mod:`torch_bf16.rules.lion` for the equations. Use a learning rate three to ten
    times smaller than AdamW's and a weight decay larger by the same factor, as the paper does.

    Args:
        params: as for :class:`AdamW`, as are errors and all arguments not listed here.
        lr: learning rate, a float or a 0-d tensor; each step moves every weight by this much.
        betas: weight of the momentum in the sign, and the momentum's decay rate.
        weight_decay: coefficient of the decoupled weight decay.
        cautious: as for :class:`AdamW`.

    Example:
        >>> optimizer = torch_bf16.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
    """

    decouples = True
    variants = OF_LION

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        cautious: bool = False,
        fully_decoupled_weight_decay: bool | float = False,
        recipe: str | Recipe = "bf16-stochastic",
        backend: str | None = None,
        release: bool | Mapping[str, Any] = False,
    ) -> None:
        check_ranges(lr=lr, betas=betas, weight_decay=weight_decay)
        self._construct(locals(), defaults=True)

    def rule_of_group(self, group: dict[str, Any]) -> Rule:
        return variant_of(group, self.variants) or rules.LION
