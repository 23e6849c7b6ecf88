"""Adafactor with ``torch.optim``'s signature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_bf16.backends import StepInputs
from torch_bf16.engine.member import Direction, Member
from torch_bf16.recipe import Recipe
from torch_bf16.rules import ADAFACTOR, ADAFACTOR_VECTOR, Rule

from .optimizer import BF16Optimizer

__all__ = ["Adafactor"]


class Adafactor(BF16Optimizer, torch.optim.Adafactor):
    r"""Adafactor (Shazeer & Stern, 2018), whose second moment is a row times a column, as in torch.

    With ``b = t**beta2_decay``, and means over the last two dimensions where there are two:

    .. code-block:: text

        r = r + (mean(g**2 over columns) - r) * b
        c = c + (mean(g**2 over rows) - c) * b
        v = r * c / max(mean(r), eps1)                     vectors: v = v + (g**2 - v) * b
        u = g / sqrt(max(v, eps1**2))
        a = max(eps2, rms(w)) * min(lr, 1 / sqrt(t))
        w = w * (1 - lr * weight_decay) - a / max(1, rms(u) / d) * u

    ``r``, ``c`` and the second moment of vectors are fp32 in every recipe: for a matrix they are
    a few thousandths of it, so that ``bf16-stochastic`` takes 4 bytes per parameter with a
    bf16 gradient.

    Differs from torch.optim: ``eps[0] = None`` is fp32's epsilon for bf16 parameters too, because
    the arithmetic is fp32; ``foreach`` is accepted and changes nothing.

    Args:
        params: as for :class:`AdamW`, like all errors, and all arguments but these:
        lr: highest relative step size, and what decay is multiplied by.
        beta2_decay: exponent of the decay rate, at most 0.
        eps: least root of the second moment, and least root mean square of the weights.
        d: root mean square that an update is clipped to.

    Example:
        >>> optimizer = torch_bf16.Adafactor(model.parameters(), lr=1e-2)
        >>> optimizer.step()
    """

    torch_class = torch.optim.Adafactor
    decouples = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        fully_decoupled_weight_decay: bool | float = False,
        recipe: str | Recipe = "bf16-stochastic",
        backend: str | None = None,
    ) -> None:
        self._construct(locals())

    def rule_of(self, group: dict[str, Any]) -> Rule:
        return ADAFACTOR

    def rule_for(self, group: dict[str, Any], parameter: Tensor) -> Rule:
        return ADAFACTOR if parameter.ndim > 1 else ADAFACTOR_VECTOR

    def direction_of(self, member: Member) -> Direction:
        parameter, state, format_ = member.parameter, member.state, member.formats[0]
        others = tuple(state[key] for key in format_.plane_names("")[1:])

        def direction(gradient: Tensor, step: int, told: StepInputs) -> Tensor:
            group = self.param_groups[member.group]
            eps1, eps2 = group["eps"]
            eps1 = torch.finfo(torch.float32).eps if eps1 is None else eps1
            share = float(step) ** group["beta2_decay"]
            scale = float(told.multiplier) * (-1.0 if group.get("maximize") else 1.0)
            g = gradient.float() * scale
            weight = format_.decode((parameter.detach().contiguous(), *others))
            size = _rms(weight).clamp(min=eps2) * min(float(group["lr"]), step**-0.5)
            del weight
            if parameter.ndim > 1:
                rows, columns = state["row_var"], state["col_var"]
                # Squares of norms: no tensor of the gradient's size in between.
                rows.lerp_(_mean_square(g, -1), share)
                columns.lerp_(_mean_square(g, -2), share)
                v = rows @ columns
                v /= rows.mean(dim=-2, keepdim=True).clamp(min=eps1)
            else:
                v = state["variance"].lerp_(g * g, share).clone()
            update = v.clamp_(min=eps1 * eps1).rsqrt_().mul_(g)
            return update.mul_(size / (_rms(update) / group["d"]).clamp(min=1.0))

        return direction


def _mean_square(g: Tensor, dim: int) -> Tensor:
    return torch.linalg.vector_norm(g, dim=dim, keepdim=True).square_() / g.shape[dim]


def _rms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x) / max(x.numel(), 1) ** 0.5
