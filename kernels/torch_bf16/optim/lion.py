"""Lion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torch_bf16 import rules
from torch_bf16.argument_checks import check_ranges
from torch_bf16.recipe import Recipe

from .optimizer import BF16Optimizer
from .variants import OF_LION

__all__ = ["Lion"]


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
    family = "lion"
    _rule = rules.LION

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
