"""Adam, AdamW, NAdam and RAdam with ``torch.optim``'s signatures, and ADOPT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_bf16 import rules
from torch_bf16.argument_checks import check_ranges
from torch_bf16.recipe import Recipe
from torch_bf16.rules import Rule
from torch_bf16.rules.nadam import mu_product

from .optimizer import BF16Optimizer
from .variants import OF_ADAMW, variant_of

__all__ = ["ADOPT", "Adam", "AdamW", "NAdam", "RAdam"]


class _AdamFamily(BF16Optimizer):
    family = "adam"

    def rule_of_group(self, group: dict[str, Any]) -> Rule:
        if (variant := variant_of(group, self.variants)) is not None:
            return variant
        if self.decouples_decay(group):
            return rules.ADAMW_AMSGRAD if group["amsgrad"] else rules.ADAMW
        return rules.ADAM_AMSGRAD if group["amsgrad"] else rules.ADAM


class AdamW(_AdamFamily, torch.optim.AdamW):
    r"""AdamW (Loshchilov & Hutter, 2019) whose numbers are stored by a recipe.

    Weight decay is part of the update, which is rounded only once. The arithmetic is fp32, as in
    torch's AdamW with fp32 weights: so is the factor ``1 - lr * weight_decay``, whose spacing is
    6e-8, and an ``lr * weight_decay`` of at most ``2**-25``, 3e-8, has no effect. See
    :mod:`torch_bf16.rules.adam` for the equations.

    Differs from torch.optim: ``foreach`` and ``fused`` are accepted and ignored (one fused call
    updates everything anyway); ``differentiable`` is refused.

    Args:
        params: bf16, fp32 or complex64 parameters, ``(name, parameter)`` pairs, or groups of them.
            Names key the rounding noise; without names, positions do.
        lr: learning rate, a float or a 0-d tensor.
        betas: decay rates of the first and the second moment.
        eps: added to the square root of the second moment.
        weight_decay: coefficient of the decoupled weight decay.
        amsgrad: divide by the square root of the largest second moment so far, a third state in the
            recipe's ``exp_avg_sq`` format. A maximum accumulates the upward errors of a second
            moment that is rounded stochastically; ``Recipe(..., exp_avg_sq="fp32")`` avoids them.
        maximize: ascend instead of descend.
        foreach: ignored.
        capturable: let a CUDA graph record a step, with the Triton backend and after an ordinary
            step; ``lr`` as a tensor on the device may then change between replays.
        differentiable: must be False.
        fused: ignored.
        cautious: leave out updates whose sign differs from the gradient's, and scale up the others
            to make up for them (Liang et al., 2024); also an option of a parameter group. See
            :mod:`torch_bf16.rules.cautious`.
        update_clipping: divide a tensor's learning rate, which also scales its decay, by the root
            mean square of (gradient / square root of the second moment), if that is above 1
            (StableAdamW: Wortsman et al., 2023); also an option of a parameter group. See
            :mod:`torch_bf16.rules.stable_adamw`.
        fully_decoupled_weight_decay: multiply weights by ``1 - lr / peak * weight_decay`` instead
            of ``1 - lr * weight_decay``, so that tuning ``lr`` does not change the decay, while the
            schedule acts on both. True if ``lr`` is the peak of the schedule, else that peak; also
            an option of a parameter group. ``weight_decay=peak * 0.1`` then has the effect that
            ``weight_decay=0.1`` has without it.
        recipe: a name from :data:`torch_bf16.RECIPES` or a :class:`torch_bf16.Recipe`.
        backend: name of the backend that takes the steps, as listed by ``python -m torch_bf16
            info``; None for the best that works on the parameters' device.
        release: take steps inside ``backward()`` and free each gradient after its step: True, or a
            dict with ``max_norm``, ``norm`` or ``accumulation_steps`` of
            :func:`torch_bf16.release_gradients`. Copies of the optimizer do so, too. With several
            ranks and no ``fully_shard``, call that function with the module instead.

    ``cautious`` and ``update_clipping`` need a mean over each whole tensor: a step reads gradients
    and states twice, and ranks that hold parts of a tensor sum one integer for it, so that any
    number of ranks gives the bits of one process. They take no memory. Loading a state dict without
    these options leaves them as they are.

    Raises:
        ValueError: the recipe or the backend is unknown, an argument is out of range, or a
            parameter is neither bf16, fp32 nor complex64.
        NotImplementedError: two of ``amsgrad``, ``cautious`` and ``update_clipping`` at once.

    Example:
        >>> model = torch_bf16.cast_model(torch.nn.Linear(8, 8))
        >>> optimizer = torch_bf16.AdamW(model.parameters(), lr=1e-3)
        >>> model(torch.randn(2, 8, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
    """

    torch_class = torch.optim.AdamW
    decouples = True
    variants = OF_ADAMW

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        cautious: bool = False,
        update_clipping: bool = False,
        fully_decoupled_weight_decay: bool | float = False,
        recipe: str | Recipe = "bf16-stochastic",
        backend: str | None = None,
        release: bool | Mapping[str, Any] = False,
    ) -> None:
        self._construct(locals())


class Adam(_AdamFamily, torch.optim.Adam):
    """Adam (Kingma & Ba, 2015), with decay as an L2 penalty, whose numbers are stored by a recipe.

    Differs from torch.optim as :class:`AdamW` does.

    Args:
        params: as for :class:`AdamW`, as are errors and all arguments not listed here.
        weight_decay: multiplied by the weight and added to the gradient.
        decoupled_weight_decay: apply the decay as AdamW does.

    Example:
        >>> optimizer = torch_bf16.Adam(model.parameters(), lr=1e-3, recipe="bf16-fp32-master")
    """

    torch_class = torch.optim.Adam

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        fully_decoupled_weight_decay: bool | float = False,
        recipe: str | Recipe = "bf16-stochastic",
        backend: str | None = None,
        release: bool | Mapping[str, Any] = False,
    ) -> None:
        self._construct(locals())


class NAdam(BF16Optimizer, torch.optim.NAdam):
    """NAdam (Dozat, 2016), Adam with Nesterov's momentum, whose numbers are stored by a recipe.

    See :mod:`torch_bf16.rules.nadam` for the equations.

    Differs from torch.optim: ``mu_product`` is not a state; it is computed from the step and the
    current ``betas`` and ``momentum_decay``, as if these had never changed. ``state_dict`` contains
    it so that torch's NAdam can load it. The other differences are those of :class:`AdamW`.

    Args:
        params: as for :class:`AdamW`, as are errors and all arguments not listed here.
        weight_decay: multiplied by the weight and added to the gradient, unless decoupled.
        momentum_decay: how fast the momentum coefficient rises to ``betas[0]``.
        decoupled_weight_decay: apply the decay as AdamW does.

    Example:
        >>> optimizer = torch_bf16.NAdam(model.parameters(), lr=2e-3)
    """

    torch_class = torch.optim.NAdam
    family = "adam"
    _rule = rules.NADAM

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
        release: bool | Mapping[str, Any] = False,
    ) -> None:
        self._construct(locals())

    def _complete(self, state: Mapping[str, Any], *arguments: Any) -> dict[str, Any]:
        ours = {key: value for key, value in state.items() if key != "mu_product"}
        return super()._complete(ours, *arguments)

    def state_dict(self) -> dict[str, Any]:
        """The state dict as for other optimizers, plus torch's ``mu_product`` of each parameter."""
        state_dict = super().state_dict()
        state = dict(state_dict["state"])
        for group in state_dict["param_groups"]:
            beta1, decay = float(group["betas"][0]), float(group["momentum_decay"])
            for key in group["params"]:
                own = state.get(key)
                # Users' entries may be all there is before the first step.
                if own and "step" in own:
                    product = mu_product(beta1, decay, int(own["step"]))
                    product = torch.tensor(product, dtype=torch.float32, device="cpu")
                    state[key] = {**own, "mu_product": product}
        return {**state_dict, "state": state}


class RAdam(BF16Optimizer, torch.optim.RAdam):
    """RAdam (Liu et al., 2020), Adam that warms itself up, whose numbers are stored by a recipe.

    See :mod:`torch_bf16.rules.radam` for the equations.

    Differs from torch.optim as :class:`AdamW` does.

    Args:
        params: as for :class:`AdamW`, as are errors and all arguments not listed here.
        weight_decay: multiplied by the weight and added to the gradient, unless decoupled.
        decoupled_weight_decay: apply the decay as AdamW does.

    Example:
        >>> optimizer = torch_bf16.RAdam(model.parameters(), lr=1e-3)
    """

    torch_class = torch.optim.RAdam
    family = "adam"
    _rule = rules.RADAM

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
        release: bool | Mapping[str, Any] = False,
    ) -> None:
        self._construct(locals())


class ADOPT(BF16Optimizer):
    """ADOPT (Taniguchi et al., 2024): an Adam that converges whatever ``betas[1]`` is.

    The gradient is normalised by the second moment of the previous steps, and clipped. See
    :mod:`torch_bf16.rules.adopt` for the equations. They are those of the authors' code, where the
    first step only measures the gradient.

    A second moment with ``betas[1] = 0.9999`` changes by 0.01 % a step, so it must not be rounded
    to nearest in bf16; neither named recipe does that.

    Args:
        params: as for :class:`AdamW`, as are errors and all arguments not listed here.
        eps: lower bound of the square root of the second moment, which the gradient is divided by.
        weight_decay: multiplied by the weight and added to the gradient, unless decoupled.
        decoupled_weight_decay: apply the decay as AdamW does.
        clip: bound the normalised gradient by the fourth root of the number of previous steps.

    Example:
        >>> optimizer = torch_bf16.ADOPT(model.parameters(), lr=1e-3, decoupled_weight_decay=True)
    """

    family = "adopt"
    _rule = rules.ADOPT

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
        release: bool | Mapping[str, Any] = False,
    ) -> None:
        check_ranges(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._construct(locals(), defaults=True)
