"""Muon with ``torch.optim``'s signature, and AdamW for parameters that are not matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from torch_bf16.argument_checks import check_ranges
from torch_bf16.backends import StepInputs, fetch
from torch_bf16.engine.batch import Batch, Task
from torch_bf16.engine.direction import Direction, Solution
from torch_bf16.engine.member import Member
from torch_bf16.errors import prefix_errors
from torch_bf16.recipe import Recipe
from torch_bf16.rules import ADAMW, AVERAGE, FIRST_MOMENT, MUON, Rule
from torch_bf16.sharding import Span, local, shard_of

from .group_direction import GroupDirection
from .newton_schulz import orthogonalise_each
from .optimizer import BF16Optimizer
from .validation import check_real

__all__ = ["Muon"]

_ADJUSTMENTS = (None, "original", "match_rms_adamw")
# torch has Muon since 2.9.
_TorchMuon: Any = getattr(torch.optim, "Muon", torch.optim.Optimizer)


def _check_shape(shape: Sequence[int]) -> None:
    if len(shape) not in (2, 3):
        raise ValueError(
            f"has shape {tuple(shape)}, and Muon steps matrices and stacks of them. Put it into a "
            "group with use_muon=False, which AdamW steps: torch_bf16.param_groups(model, "
            "muon=True)"
        )


def _check_direction(options: Mapping[str, Any]) -> None:
    """Refuse options from which no direction can be computed: of a group, or for all groups."""
    check_ranges(momentum=options["momentum"], eps=options["eps"])
    if (adjustment := options["adjust_lr_fn"]) not in _ADJUSTMENTS:
        known = ", ".join(map(repr, _ADJUSTMENTS))
        raise ValueError(f"unknown adjust_lr_fn={adjustment!r}; known: {known}")
    coefficients, steps = options["ns_coefficients"], options["ns_steps"]
    numbers = [*coefficients] if isinstance(coefficients, Iterable) else []
    if len(numbers) != 3 or not all(isinstance(each, Real | Tensor) for each in numbers):
        raise ValueError(f"ns_coefficients={coefficients!r} must be three numbers")
    if not isinstance(steps, Integral) or not 0 <= int(steps) < 100:
        raise ValueError(f"ns_steps={steps!r} must be an integer, at least 0 and below 100")


def _shape_factor(adjustment: str | None, shape: tuple[int, ...]) -> float:
    if adjustment == "match_rms_adamw":
        return 0.2 * math.sqrt(max(shape))
    return math.sqrt(max(1.0, shape[0] / max(shape[1], 1)))


class Muon(BF16Optimizer, _TorchMuon):
    r"""Muon (Jordan et al., 2024): momentum, orthogonalised, for the matrices of hidden layers.

    With the gradient g, and for matrices of A rows and B columns:

    .. code-block:: text

        m = momentum * m + (1 - momentum) * g
        u = (1 - momentum) * g + momentum * m with nesterov, else m
        w = w * (1 - lr * weight_decay) - lr * factor * orthogonalise(u)
        factor = sqrt(max(1, A / B)), or 0.2 * sqrt(max(A, B)) for "match_rms_adamw"

    ``m`` has the recipe's ``exp_avg`` format. A parameter of three dimensions is a stack of
    matrices, such as the experts of a layer, each of which is orthogonalised by itself; a
    convolution's kernel is not one, and belongs to AdamW. Parameter groups with ``use_muon=False``
    are stepped by AdamW (``lr``, ``betas``, ``eps``, ``weight_decay``): embeddings, the output
    layer, and everything that is not a matrix. ``torch_bf16.param_groups(model, muon=True)`` makes
    such groups.

    If a matrix is sharded by ``fully_shard``, tensor parallelism or FSDP1, one rank owns it: that
    rank gets ``u`` in bf16, orthogonalises it, and sends each rank its elements in bf16. The result
    has the bits of one process.

    Differs from torch.optim: it includes AdamW, accepts stacks and has ``maximize``; ``u`` is
    computed from the momentum as it is stored. A step needs three fp32 copies of one matrix at a
    time.

    Args:
        params: as for :class:`AdamW`, as are all arguments not listed here. Muon steps every group
            without ``use_muon=False``.
        momentum: decay rate of the momentum buffer.
        nesterov: look ahead along the momentum.
        ns_coefficients: the three coefficients of the Newton-Schulz polynomial.
        eps: lower bound of the norm that a matrix is divided by.
        ns_steps: number of Newton-Schulz iterations, below 100.
        adjust_lr_fn: None or ``"original"``, or ``"match_rms_adamw"`` (Liu et al., 2025), with
            which AdamW's ``lr`` and ``weight_decay`` can be used.
        adamw_betas: ``betas`` of groups with ``use_muon=False`` that do not set their own.
        adamw_eps: ``eps`` of groups with ``use_muon=False`` that do not set their own.

    Raises:
        ValueError: an argument is out of range, or a group without ``use_muon`` holds a parameter
            that is neither a matrix nor a stack of them.

    Example:
        >>> groups = torch_bf16.param_groups(model, weight_decay=0.1, muon=True)
        >>> optimizer = torch_bf16.Muon(groups, lr=1e-3, adjust_lr_fn="match_rms_adamw")
        >>> optimizer.step()
    """

    torch_class = _TorchMuon
    decouples = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        maximize: bool = False,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        fully_decoupled_weight_decay: bool | float = False,
        recipe: str | Recipe = "bf16-stochastic",
        backend: str | None = None,
        release: bool | Mapping[str, Any] = False,
    ) -> None:
        check_ranges(lr=lr, weight_decay=weight_decay, betas=adamw_betas, adamw_eps=adamw_eps)
        _check_direction(locals())
        # Not torch's own constructor, which refuses everything that is not a matrix.
        self._construct(locals(), defaults=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch; with ``use_muon=False`` AdamW steps it, else Muon.

        Raises:
            ValueError: Muon would step a parameter that is neither a matrix nor a stack of them.
        """
        if not param_group.get("use_muon", True):
            # A converted torch.optim.Muon has no such defaults.
            betas = self.defaults.get("adamw_betas", (0.9, 0.95))
            eps = self.defaults.get("adamw_eps", 1e-8)
            param_group = {"betas": betas, "eps": eps, **param_group}
        super().add_param_group(param_group)
        # torch puts every default into every group, but these are only for groups of AdamW.
        for name in ("adamw_betas", "adamw_eps"):
            self.param_groups[-1].pop(name, None)

    def _check_group(self, group: dict[str, Any], number: int) -> None:
        super()._check_group(group, number)
        if not group.get("use_muon", True):
            return
        check_real(group, number, type(self).__name__)
        names = group.get("param_names") or []
        for position, parameter in enumerate(group["params"]):
            if not is_lazy(parameter):
                name = names[position] if position < len(names) else f"number {position}"
                with prefix_errors(lambda name=name: f"parameter {name} of group {number}"):
                    _check_shape(shard_of(parameter).shape)

    def _check_options(self, group: Mapping[str, Any], number: int) -> None:
        super()._check_options(group, number)
        if group.get("use_muon", True):
            with prefix_errors(lambda: f"parameter group {number}:"):
                _check_direction(group)

    def rule_of_group(self, group: dict[str, Any]) -> Rule:
        return MUON if group.get("use_muon", True) else ADAMW

    def direction_of(self, member: Member) -> Direction:
        # A lazy parameter had no shape when its group was checked.
        _check_shape(member.shard.shape)
        return _Momentum(self, member)


class _Momentum(GroupDirection):
    """The direction of a parameter: its momentum, with each matrix orthogonalised."""

    answer = None, torch.bfloat16
    prepares = "momentum_buffer"

    def __init__(self, optimizer: Muon, member: Member) -> None:
        super().__init__(optimizer, member)
        shard, dtype, recipe = member.shard, member.parameter.dtype, optimizer.recipe
        self._shape, self._local_shape = shard.shape, shard.memory.shape
        self._device = shard.memory.device
        self._format = recipe.format_of(FIRST_MOMENT, shard.shape, dtype)
        names = self._format.plane_names("momentum_buffer")
        self._planes = tuple(local(member.state[key]).detach() for key in names)
        # The runs of a sharded parameter may be too long for one task.
        self._spans = shard.span.split()
        tasks = [self._task(span, member.gradient_dtype) for span in self._spans]
        self._average = Batch(tasks, recipe.seed, optimizer.backend)

    def _task(self, span: Span, gradient: torch.dtype) -> Task:
        pairs = zip(self._planes, self._format.planes, strict=True)
        planes = tuple(span.of(each, plane.block) for each, plane in pairs)
        return Task(span, AVERAGE, (self._format,), (planes,), gradient, self._device)

    @property
    def kind(self) -> tuple[tuple[float, ...], int, float]:
        options = self._options
        return tuple(options["ns_coefficients"]), options["ns_steps"], float(options["eps"])

    def prepare(self, gradient: Tensor, step: int, inputs: StepInputs) -> tuple[Tensor, ...]:
        options, scale = self._options, self._scale_of(inputs)
        momentum = float(options["momentum"])
        parts = [span.of(gradient) for span in self._spans]
        self._average.run_alike(parts, step, (1.0 - momentum,), scale=scale)
        update = self._format.decode(fetch(self._planes, self._device)).view(self._local_shape)
        if options["nesterov"]:
            update = (gradient.float() * scale).lerp(update, momentum)
        # Ranks send it in bf16, because orthogonalisation computes in bf16.
        return (update.bfloat16(),)

    def solve(self, others: Sequence[Any], tensors: Sequence[tuple[Tensor, ...]]) -> list[Solution]:
        solutions = orthogonalise_each([x for (x,) in tensors], *self.kind)
        return [Solution(each.contiguous()) for each in solutions]

    def finish(
        self, prepared: tuple[Tensor, ...], answer: Tensor, intermediate: Tensor | None
    ) -> Tensor:
        factor = _shape_factor(self._options["adjust_lr_fn"], self._shape[-2:])
        return answer.view(self._local_shape).float() * factor
