"""NAdam with ``torch.optim``'s signature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_bf16.recipe import Recipe
from torch_bf16.rules import NADAM, Rule
from torch_bf16.rules.nadam import mu_product

from .optimizer import BF16Optimizer

__all__ = ["NAdam"]


class NAdam(BF16Optimizer, torch.optim.NAdam):
    """NAdam (Dozat, 2016), Adam with Nesterov's momentum, whose numbers are stored by a recipe.

    See :mod:`torch_bf16.rules.nadam` for the equations.

    Differs from torch.optim: ``mu_product`` is no state, it is computed from the step and from
    ``betas`` and ``momentum_decay`` as they are, as if these had never changed; ``state_dict``
    contains it for torch's sake. The other differences are those of :class:`AdamW`.

    Args:
        params: as for :class:`AdamW`, like all arguments but these:
        weight_decay: multiplied by the weight and added to the gradient, unless decoupled.
        momentum_decay: how fast the momentum coefficient rises to ``betas[0]``.
        decoupled_weight_decay: decay as AdamW does.

    Raises:
        ValueError: an argument is out of range, or a parameter is neither bf16 nor fp32.

    Example:
        >>> optimizer = torch_bf16.NAdam(model.parameters(), lr=2e-3)
    """

    torch_class = torch.optim.NAdam

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
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
        return NADAM

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's own looks for it in every state.
        for own in state["state"].values():
            own["mu_product"] = torch.ones(())
        super().__setstate__(state)
        for own in self.state.values():
            own.pop("mu_product", None)

    def state_dict(self) -> dict[str, Any]:
        """As of the other optimizers, with torch's ``mu_product`` for each parameter."""
        state_dict = super().state_dict()
        state = dict(state_dict["state"])
        for group in state_dict["param_groups"]:
            beta1, decay = float(group["betas"][0]), float(group["momentum_decay"])
            for key in group["params"]:
                if own := state.get(key):
                    product = mu_product(beta1, decay, int(own["step"]))
                    state[key] = {**own, "mu_product": torch.tensor(product, dtype=torch.float32)}
        return {**state_dict, "state": state}
