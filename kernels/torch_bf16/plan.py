"""The plan of a step: made once, reused while the same tensors take part.

Parameters are grouped into buckets that one kernel call updates: by device, rule, formats and
gradient dtype. Parameter groups do not separate them; each group's hyperparameters are a row of a
small table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .backends import Bucket, Variant, choose
from .counter_rng import stream_base, tensor_key
from .recipe import Recipe
from .rules import Rule
from .sharding import Span, is_dtensor, local, local_gradient

__all__ = ["Member", "Plan"]


@dataclass(slots=True)
class Member:
    """A parameter that takes part in a step, and what its tensors were when that was planned.

    Attributes:
        parameter: bf16 or fp32, with a gradient that is bf16 or fp32 and shaped like it.
        group: number of its parameter group.
        rule: the group's rule.
        state: ``optimizer.state[parameter]``, complete.
        spans: what whole tensors its memory on this rank is made of.
    """

    parameter: Tensor
    group: int
    rule: Rule
    state: Mapping[str, Any]
    spans: Sequence[Span]
    _keys: tuple[str, ...] = field(init=False)
    _tensors: tuple[Tensor, ...] = field(init=False)
    _planned: tuple[Any, ...] = field(init=False)
    _is_dtensor: bool = field(init=False)

    def __post_init__(self) -> None:
        self._is_dtensor = is_dtensor(self.parameter)
        self._keys, self._tensors = zip(*self.state.items(), strict=True)
        self._planned = self._look()

    def unchanged(self, state: Mapping[str, Any]) -> bool:
        """Whether all tensors are those of the plan, in the same memory.

        Args:
            state: ``optimizer.state[parameter]`` now.
        """
        same = all(map(is_, map(state.get, self._keys), self._tensors))
        return same and self._look() == self._planned

    def gradient(self) -> Tensor:
        """This rank's part of the gradient, contiguous."""
        gradient: Any = self.parameter.grad
        if self._is_dtensor:
            gradient = local_gradient(self.parameter, gradient)
        # A lazily negated view is contiguous, too, and its memory has the other sign.
        return gradient.resolve_neg().contiguous()

    def _look(self) -> tuple[Any, ...]:
        parameter: Any = self.parameter
        gradient = parameter.grad
        memory = local(parameter)
        return (
            memory.data_ptr(),
            parameter.dtype,
            parameter.device,
            parameter.shape,
            memory.shape,
            memory.stride(),
            gradient.dtype,
            gradient.device,
            gradient.shape,
            gradient.layout,
            # `state["exp_avg"].data = ...` keeps the tensor and frees the memory that kernels know.
            [(local(each).data_ptr(), each.dtype, each.shape) for each in self._tensors],
        )


class Plan:
    """Buckets and tables for the parameters that take part in a step.

    Args:
        members: in a fixed order.
        recipe: decides formats and seed.
        backend: name of the backend, None for the best that works on each device.
        setting: whatever else the members follow from; :meth:`fits` compares it.
    """

    def __init__(
        self, members: Sequence[Member], recipe: Recipe, backend: str | None, setting: Any
    ) -> None:
        self.members = members
        self._setting = setting
        alike: dict[Any, list[_Row]] = defaultdict(list)
        for each in members:
            # A strided parameter goes through a contiguous copy. On its own, so that no more than
            # one such copy exists at a time.
            alone = None if local(each.parameter).is_contiguous() else id(each)
            for row in (_Row(each, short) for span in each.spans for short in span.short()):
                alike[_variant(row, recipe), alone].append(row)
        self._parts = [
            _Part(
                choose(variant.device, backend),
                _bucket(variant, some, recipe.seed),
                some,
                np.array([row.member.group for row in some], np.int64),
                [row.member.state["step"].numpy() for row in some],
                copied=alone is not None,
            )
            for (variant, alone), some in alike.items()
        ]

    def fits(
        self, setting: Any, parameters: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Any]]
    ) -> bool:
        """Whether the plan was made for these very tensors: then there is nothing to check.

        Args:
            setting: as it was given to the constructor, now.
            parameters: those with a gradient, in the members' order.
            states: ``optimizer.state``.
        """
        return (
            setting == self._setting
            and len(parameters) == len(self.members)
            and all(
                each.parameter is parameter and each.unchanged(states.get(parameter, {}))
                for each, parameter in zip(self.members, parameters, strict=True)
            )
        )

    def run(self, groups: Sequence[Mapping[str, Any]], grad_scale: float) -> None:
        """Take the step: update parameters and states in place, and count it in ``state["step"]``.

        Args:
            groups: the optimizer's parameter groups; only hyperparameters are read.
            grad_scale: multiplied into every gradient.
        """
        # All scalars first: a bad hyperparameter must raise before anything is updated.
        for part in self._parts:
            part.set_scalars(groups, grad_scale)
        for part in self._parts:
            part.run()


@dataclass(slots=True)
class _Row:
    """A tensor of a bucket: one span of a member."""

    member: Member
    span: Span

    def of(self, memory: Tensor) -> Tensor:
        """The span's elements of one of the member's tensors on this rank."""
        start, numel = self.span.start, self.span.numel
        return memory if memory.numel() == numel else memory.view(-1)[start : start + numel]

    def like(self) -> Tensor:
        """What formats follow from: the parameter, or a stand-in for the one it was made of."""
        parameter = self.member.parameter
        if self.span.shape == tuple(parameter.shape):
            return parameter
        return torch.empty(self.span.shape, dtype=parameter.dtype, device="meta")


@dataclass
class _Part:
    backend: ModuleType
    bucket: Bucket
    rows: list[_Row]
    groups: np.ndarray
    # Views of state["step"]: to add to a 0-d tensor takes torch a microsecond.
    counters: list[np.ndarray]
    copied: bool

    def set_scalars(self, groups: Sequence[Mapping[str, Any]], grad_scale: float) -> None:
        """One row of scalars for each (step, group) that occurs, and each tensor's row."""
        bucket, n = self.bucket, len(groups)
        bucket.steps = np.array([int(each.item()) for each in self.counters], np.int64) + 1
        pairs, bucket.rows = np.unique(bucket.steps * n + self.groups, return_inverse=True)
        table = [
            _scalars(bucket.variant.rule, groups[pair % n], pair % n, pair // n, grad_scale)
            for pair in pairs.tolist()
        ]
        bucket.scalars = np.array(table, np.float64).astype(np.float32)

    def run(self) -> None:
        self.bucket.gradients = [row.of(row.member.gradient()) for row in self.rows]
        self._update()
        self.bucket.gradients = ()
        for counter, step in zip(self.counters, self.bucket.steps.tolist(), strict=True):
            counter[()] = step

    def _update(self) -> None:
        if not self.copied:
            self.backend.run(self.bucket)
            return
        ((weights, *states),) = self.bucket.planes
        copy = weights[0].contiguous()
        self.backend.run(replace(self.bucket, planes=[[(copy, *weights[1:]), *states]]))
        weights[0].copy_(copy)


def _variant(row: _Row, recipe: Recipe) -> Variant:
    each, like = row.member, row.like()
    gradient: Any = each.parameter.grad
    return Variant(
        rule=each.rule,
        weights=recipe.format_of("weights", like),
        states=tuple(recipe.format_of(s.role, like) for s in each.rule.states),
        gradient=gradient.dtype,
        device=each.parameter.device,
        strided=row.span.strided,
    )


def _bucket(variant: Variant, rows: Sequence[_Row], seed: int) -> Bucket:
    spans = [row.span for row in rows]
    keys = [tensor_key(span.name) for span in spans]
    bases = [[stream_base(seed, key, draw.stream) for draw in variant.draws] for key in keys]
    return Bucket(
        variant=variant,
        planes=[_planes(row, variant) for row in rows],
        numels=np.array([span.numel for span in spans], np.int64),
        offsets=np.array([span.offset for span in spans], np.int64),
        widths=np.array([span.width for span in spans], np.int64),
        pitches=np.array([span.pitch for span in spans], np.int64),
        bases=np.array(bases, np.uint32),
    )


def _planes(row: _Row, variant: Variant) -> list[tuple[Tensor, ...]]:
    each = row.member
    tensors = {**each.state, "": each.parameter.detach()}
    names = ("", *(state.name for state in variant.rule.states))
    return [
        tuple(row.of(local(tensors[key])) for key in stored.plane_names(name))
        for name, stored in zip(names, variant.formats, strict=True)
    ]


def _scalars(rule: Rule, group: Mapping[str, Any], number: int, step: int, grad_scale: float):
    sign = -1.0 if group.get("maximize") else 1.0
    try:
        options = tuple(float(option) for option in rule.options(group))
        return rule.scalars(options, step, sign * grad_scale)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        given = {k: v for k, v in group.items() if not k.startswith("param")}
        raise ValueError(
            f"no step follows from the options of group {number}: {given}; "
            "set them to numbers. Nothing was updated"
        ) from error
