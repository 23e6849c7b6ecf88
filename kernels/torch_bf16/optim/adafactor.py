"""Adafactor with ``torch.optim``'s signature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bf16.argument_checks import check_ranges, is_number
from torch_bf16.backends import StepInputs, fetch
from torch_bf16.engine.direction import Direction, Solution
from torch_bf16.engine.member import Member
from torch_bf16.errors import prefix_errors
from torch_bf16.recipe import Recipe
from torch_bf16.rules import ADAFACTOR, ADAFACTOR_VECTOR, Rule
from torch_bf16.sharding import local, shard_of

from .group_direction import GroupDirection
from .optimizer import BF16Optimizer
from .validation import check_real

__all__ = ["Adafactor"]


class Adafactor(BF16Optimizer, torch.optim.Adafactor):
    r"""Adafactor (Shazeer & Stern, 2018): as in torch, its second moment is a row times a column.

    With ``b = t**beta2_decay``, and means over the last two dimensions where there are two:

    .. code-block:: text

        r = r + (mean(g**2 over columns) - r) * b
        c = c + (mean(g**2 over rows) - c) * b
        v = r * c / max(mean(r), eps1)                     vectors: v = v + (g**2 - v) * b
        u = g / sqrt(max(v, eps1**2))
        a = max(eps2, rms(w)) * min(lr, 1 / sqrt(t))
        w = w * (1 - lr * weight_decay) - a / max(1, rms(u) / d) * u

    ``r``, ``c`` and the second moment of vectors are fp32 in every recipe. ``r`` and ``c`` of a
    matrix take a few thousandths of its size, so that ``bf16-stochastic`` takes 4 bytes per
    parameter with a bf16 gradient.

    If ranks hold parts of a parameter, one of them owns it during a step: it gets gradients and
    weights, and sends ``r``, ``c`` and the factor of ``u`` to the others, so that the result has
    the bits of one process.

    Differs from torch.optim: ``eps[0] = None`` is fp32's epsilon for bf16 parameters too, because
    the arithmetic is fp32; ``foreach`` is accepted and ignored.

    Args:
        params: as for :class:`AdamW`, as are errors and all arguments not listed here.
        lr: upper bound of the relative step size, and factor of the weight decay.
        beta2_decay: exponent of the decay rate, at most 0.
        eps: lower bounds: of the square root of the second moment, and of the root mean square of
            the weights.
        d: root mean square that an update is clipped to.

    Example:
        >>> optimizer = torch_bf16.Adafactor(model.parameters(), lr=1e-2)
        >>> optimizer.step()
    """

    torch_class = torch.optim.Adafactor
    decouples = True
    _rule = ADAFACTOR

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
        release: bool | Mapping[str, Any] = False,
    ) -> None:
        self._construct(locals())

    def _check_group(self, group: dict[str, Any], number: int) -> None:
        super()._check_group(group, number)
        check_real(group, number, type(self).__name__)

    def _check_options(self, group: Mapping[str, Any], number: int) -> None:
        super()._check_options(group, number)
        with prefix_errors(lambda: f"parameter group {number}:"):
            _check_direction(group)

    def rule_of_parameter(self, group: dict[str, Any], parameter: Tensor) -> Rule:
        return ADAFACTOR if len(shard_of(parameter).shape) > 1 else ADAFACTOR_VECTOR

    def direction_of(self, member: Member) -> Direction:
        return (_Matrix if len(member.shard.shape) > 1 else _Vector)(self, member)


def _check_direction(options: Mapping[str, Any]) -> None:
    """Refuse options from which no direction can be computed."""
    eps, decay, d = options["eps"], options["beta2_decay"], options["d"]
    if not isinstance(eps, Sequence) or isinstance(eps, str) or len(eps) != 2:
        raise ValueError(f"eps={eps!r} must be two numbers, the first of which may be None")
    check_ranges(**{f"eps[{i}]": each for i, each in enumerate(eps) if i or each is not None})
    if not is_number(decay) or not decay <= 0.0:
        raise ValueError(f"beta2_decay={decay!r} must be a number of at most 0")
    if not is_number(d) or not d >= 1.0:
        raise ValueError(f"d={d!r} must be a number of at least 1")


class _Relative(GroupDirection):
    """Base of the directions of matrices and vectors: steps relative to the size of the weights."""

    prepares = None

    def __init__(self, optimizer: Adafactor, member: Member) -> None:
        super().__init__(optimizer, member)
        # Not the member, which holds this object.
        self._shard, self._format, self._state = member.shard, member.formats[0], member.state
        self._new: list[tuple[Tensor, Tensor]] = []

    @property
    def kind(self) -> int:
        return self._group

    @property
    def _eps(self) -> float:
        eps = self._options["eps"][0]
        return torch.finfo(torch.float32).eps if eps is None else eps

    def _begin(self, step: int, inputs: StepInputs) -> Tensor:
        """Set up a step; returns this rank's part of the weight, fp32 if bf16 is not all of it."""
        self._step, self._share = step, float(step) ** self._options["beta2_decay"]
        self._scale = self._scale_of(inputs)
        memory = self._shard.memory.contiguous()
        beside = [local(self._state[key]) for key in self._format.plane_names("")[1:]]
        return self._format.decode((memory, *fetch(beside, memory.device))) if beside else memory

    def _factor(self, weight: Tensor, update: Tensor) -> Tensor:
        """The factor of the whole update."""
        group = self._options
        size = _rms(weight.float()).clamp(min=group["eps"][1])
        size = size * min(float(group["lr"]), self._step**-0.5)
        return size / (_rms(update) / group["d"]).clamp(min=1.0)

    def solve(
        self, others: Sequence[Any], tensors: Sequence[tuple[Tensor, ...]]
    ) -> Iterator[Solution]:
        return (other._solve(*each) for other, each in zip(others, tensors, strict=True))

    def store(self) -> None:
        for state, new in self._new:
            state.copy_(new.view_as(state))
        self._new = []


class _Matrix(_Relative):
    """A matrix or a stack: ranks send gradients and weights, and get rows, columns and a factor."""

    def __init__(self, optimizer: Adafactor, member: Member) -> None:
        super().__init__(optimizer, member)
        self._rows, self._columns = (member.state[each.name] for each in ADAFACTOR.stage_states)
        self._sizes = self._rows.numel(), self._columns.numel(), 1
        self.answer = sum(self._sizes), torch.float32

    def prepare(self, gradient: Tensor, step: int, inputs: StepInputs) -> tuple[Tensor, ...]:
        return gradient, self._begin(step, inputs)

    def _solve(self, gradient: Tensor, weight: Tensor) -> Solution:
        g = gradient.float() * self._scale
        # Squares of norms, because g * g would be another tensor of the gradient's size.
        rows = self._rows.lerp(_mean_square(g, -1), self._share)
        columns = self._columns.lerp(_mean_square(g, -2), self._share)
        # Not a matrix product, because autocast and TF32 would round it.
        v = rows * columns
        v /= self._mean(rows)
        update = v.clamp_(min=self._eps * self._eps).rsqrt_().mul_(g)
        factor = self._factor(weight, update)
        answer = torch.cat([rows.view(-1), columns.view(-1), factor.view(1)])
        return Solution(answer, update)

    def _mean(self, rows: Tensor) -> Tensor:
        return rows.mean(dim=-2, keepdim=True).clamp(min=self._eps)

    def finish(
        self, prepared: tuple[Tensor, ...], answer: Tensor, intermediate: Tensor | None
    ) -> Tensor:
        rows, columns, factor = answer.split(self._sizes)
        rows, columns = rows.view_as(self._rows), columns.view_as(self._columns)
        self._new = [(self._rows, rows), (self._columns, columns)]
        update = self._part(prepared[0], rows, columns) if intermediate is None else intermediate
        return update.mul_(factor.view(()))

    def _part(self, gradient: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """This rank's part of the update, before it is multiplied by the factor."""

        def expand(factor: Tensor) -> Tensor:
            return factor.view(-1)[span.places(factor.shape, factor.device)]

        span = self._shard.span
        v = expand(rows) * expand(columns)
        v /= expand(self._mean(rows))
        g = gradient.float() * self._scale
        return v.clamp_(min=self._eps * self._eps).rsqrt_().view(g.shape).mul_(g)


class _Vector(_Relative):
    """A vector or a number: ranks send updates and weights, and get the factor of the updates."""

    answer = 1, torch.float32

    def prepare(self, gradient: Tensor, step: int, inputs: StepInputs) -> tuple[Tensor, ...]:
        weight, g = self._begin(step, inputs), gradient.float() * self._scale
        state = local(self._state["variance"])
        variance = state.to(g.device).lerp(g * g, self._share)
        self._new = [(state, variance)]
        return variance.clamp(min=self._eps * self._eps).rsqrt_().mul_(g), weight

    def _solve(self, update: Tensor, weight: Tensor) -> Solution:
        return Solution(self._factor(weight, update).view(1))

    def finish(
        self, prepared: tuple[Tensor, ...], answer: Tensor, intermediate: Tensor | None
    ) -> Tensor:
        return prepared[0].mul_(answer.view(()))


def _mean_square(g: Tensor, dim: int) -> Tensor:
    return torch.linalg.vector_norm(g, dim=dim, keepdim=True).square_() / max(g.shape[dim], 1)


def _rms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x) / max(x.numel(), 1) ** 0.5
