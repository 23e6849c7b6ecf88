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
from torch import Tensor

from .backends import Bucket, Variant, choose
from .counter_rng import stream_base
from .recipe import Recipe
from .rules import Rule

__all__ = ["Member", "Plan"]


@dataclass(slots=True)
class Member:
    """A parameter that takes part in a step, and what its tensors were when that was planned.

    Attributes:
        parameter: bf16 or fp32, with a gradient that is bf16 or fp32 and shaped like it.
        group: number of its parameter group.
        rule: the group's rule.
        state: ``optimizer.state[parameter]``, complete.
        key: the tensor key of its noise.
    """

    parameter: Tensor
    group: int
    rule: Rule
    state: Mapping[str, Any]
    key: int
    _keys: tuple[str, ...] = field(init=False)
    _tensors: tuple[Tensor, ...] = field(init=False)
    _planned: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._keys, self._tensors = zip(*self.state.items(), strict=True)
        self._planned = self._look()

    def unchanged(self, state: Mapping[str, Any]) -> bool:
        """Whether all tensors are those of the plan, in the same memory.

        Args:
            state: ``optimizer.state[parameter]`` now.
        """
        same = all(map(is_, map(state.get, self._keys), self._tensors))
        return same and self._look() == self._planned

    def _look(self) -> tuple[Any, ...]:
        parameter: Any = self.parameter
        gradient = parameter.grad
        return (
            parameter.data_ptr(),
            parameter.dtype,
            parameter.device,
            parameter.shape,
            parameter.stride(),
            gradient.dtype,
            gradient.device,
            gradient.shape,
            gradient.layout,
            # `state["exp_avg"].data = ...` keeps the tensor and frees the memory that kernels know.
            [(each.data_ptr(), each.dtype, each.shape) for each in self._tensors],
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
        alike: dict[Any, list[Member]] = defaultdict(list)
        for each in members:
            # A strided parameter goes through a contiguous copy. On its own, so that no more than
            # one such copy exists at a time.
            alone = None if each.parameter.is_contiguous() else id(each)
            alike[_variant(each, recipe), alone].append(each)
        self._parts = [
            _Part(
                choose(variant.device, backend),
                _bucket(variant, some, recipe.seed),
                some,
                np.array([each.group for each in some], np.int64),
                [each.state["step"].numpy() for each in some],
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


@dataclass
class _Part:
    backend: ModuleType
    bucket: Bucket
    members: list[Member]
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
        gradients: list[Any] = [each.parameter.grad for each in self.members]
        # A lazily negated view is contiguous, too, and its memory has the other sign.
        self.bucket.gradients = [each.resolve_neg().contiguous() for each in gradients]
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


def _variant(each: Member, recipe: Recipe) -> Variant:
    gradient: Any = each.parameter.grad
    return Variant(
        rule=each.rule,
        weights=recipe.format_of("weights", each.parameter),
        states=tuple(recipe.format_of(s.role, each.parameter) for s in each.rule.states),
        gradient=gradient.dtype,
        device=each.parameter.device,
    )


def _bucket(variant: Variant, members: Sequence[Member], seed: int) -> Bucket:
    bases = [
        [stream_base(seed, each.key, draw.stream) for draw in variant.draws] for each in members
    ]
    return Bucket(
        variant=variant,
        planes=[_planes(each, variant) for each in members],
        numels=np.array([each.parameter.numel() for each in members], np.int64),
        offsets=np.zeros(len(members), np.int64),
        bases=np.array(bases, np.uint32),
    )


def _planes(each: Member, variant: Variant) -> list[tuple[Tensor, ...]]:
    tensors = {**each.state, "": each.parameter.detach()}
    names = ("", *(state.name for state in variant.rule.states))
    return [
        tuple(tensors[key] for key in stored.plane_names(name))
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
