"""ADOPT, which torch.optim does not have."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torch_bf16.argument_checks import check_ranges
from torch_bf16.recipe import Recipe
from torch_bf16.rules import ADOPT as RULE
from torch_bf16.rules import Rule

from .optimizer import BF16Optimizer

__all__ = ["ADOPT"]


class ADOPT(BF16Optimizer):
    """ADOPT (Taniguchi et al., 2024): an Adam that converges whatever ``betas[1]`` is.

    The gradient is divided by the second moment of the steps before, and clipped. See
    :mod:`torch_bf16.rules.adopt` for the equations, which are those of the authors' code,
    where the first step only measures the gradient.

    A second moment with ``betas[1] = 0.9999`` changes by 0.01 % a step, so it must not be rounded
    to nearest in bf16: the named recipes do not.

    Args:
        params: as for :class:`AdamW`, like all arguments but these:
        eps: least root of the second moment to divide by.
        weight_decay: multiplied by the weight and added to the gradient, unless decoupled.
        decoupled_weight_decay: decay as AdamW does.
        clip: bound the normalised gradient by the fourth root of the number of steps before.

    Raises:
        ValueError: an argument is out of range, or a parameter is neither bf16 nor fp32.

    Example:
        >>> optimizer = torch_bf16.ADOPT(model.parameters(), lr=1e-3, decoupled_weight_decay=True)
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        *,
        clip: bool = True,
        maximize: bool = False,
        fully_decoupled_weight_decay: bool | float = False,
        recipe: str | Recipe = "bf16-stochastic",
        backend: str | None = None,
    ) -> None:
        check_ranges(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._construct(locals(), defaults=True)

    def rule_of(self, group: dict[str, Any]) -> Rule:
        return RULE
