"""The plan of a step: made once, reused while the same tensors take part.

Parameters are grouped into buckets that one kernel call updates: by device, rule, formats and
gradient dtype. Parameter groups do not separate them; each group's hyperparameters are a row of a
small table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .backends import Bucket, Variant, choose
from .counter_rng import stream_base
from .recipe import Recipe
from .rules import Rule

__all__ = ["Participant", "Plan"]


@dataclass
class Participant:
    """A parameter that takes part in a step.

    Attributes:
        parameter: bf16 or fp32.
        gradient: bf16 or fp32, shaped like the parameter.
        group: its parameter group; only hyperparameters are read.
        group_index: number of that group.
        position: number of the parameter within it.
        rule: the group's rule.
        state: ``optimizer.state[parameter]``, complete.
        key: the tensor key of its noise.
    """

    parameter: Tensor
    gradient: Tensor
    group: Mapping[str, Any]
    group_index: int
    position: int
    rule: Rule
    state: Mapping[str, Any]
    key: int


class Plan:
    """Buckets and tables for a list of participants.

    Args:
        participants: in a fixed order.
        recipe: decides formats and seed.
        backend: name of the backend, None for the best that works on each device.
    """

    def __init__(
        self, participants: Sequence[Participant], recipe: Recipe, backend: str | None = None
    ) -> None:
        self.chosen = recipe, backend
        self._planes = [_planes(each, recipe) for each in participants]
        self._signature = [
            _signature(*pair) for pair in zip(participants, self._planes, strict=True)
        ]
        members: dict[Any, list[int]] = defaultdict(list)
        for index, each in enumerate(participants):
            # A strided parameter goes through a contiguous copy. On its own, so that no more than
            # one such copy exists at a time.
            alone = None if each.parameter.is_contiguous() else index
            members[_variant(each, recipe), alone].append(index)
        self._parts = [
            _Part(choose(variant.device, backend), bucket, indices, copied=alone is not None)
            for (variant, alone), indices in members.items()
            for bucket in [self._bucket(variant, indices, participants, recipe)]
        ]

    def fits(self, participants: Sequence[Participant]) -> bool:
        """Whether the plan was made for these very tensors."""
        return len(participants) == len(self._signature) and all(
            _signature(each, planes) == signature
            and all(
                each.state.get(key) is plane
                for _, named in planes
                for key, plane in named[1 if named[0][0] == "" else 0 :]
            )
            for each, planes, signature in zip(
                participants, self._planes, self._signature, strict=True
            )
        )

    def run(self, participants: Sequence[Participant], grad_scale: float) -> None:
        """Take the step: update parameters and states in place, and count it in ``state["step"]``.

        Args:
            participants: as the plan was made for; their gradients are read.
            grad_scale: multiplied into every gradient.
        """
        counters = [each.state["step"] for each in participants]
        steps = np.array([int(step) for step in torch.stack(counters).tolist()], np.int64) + 1
        # All scalars first: a bad hyperparameter must raise before anything is updated.
        for part in self._parts:
            chosen = [participants[index] for index in part.indices]
            bucket = part.bucket
            bucket.steps = steps[part.indices]
            bucket.rows, bucket.scalars = _scalar_rows(chosen, bucket.steps, grad_scale)
        for part in self._parts:
            part.bucket.gradients = [
                # A lazily negated view is contiguous, too, and its memory has the other sign.
                participants[index].gradient.resolve_neg().contiguous()
                for index in part.indices
            ]
            part.run()
            part.bucket.gradients = ()
        torch._foreach_add_(counters, 1)  # pyright: ignore[reportPrivateImportUsage]

    def _bucket(self, variant, indices, participants, recipe) -> Bucket:
        bases = [
            [stream_base(recipe.seed, participants[i].key, draw.stream) for draw in variant.draws]
            for i in indices
        ]
        return Bucket(
            variant=variant,
            planes=[
                [tuple(plane for _, plane in named) for _, named in self._planes[i]]
                for i in indices
            ],
            numels=np.array([participants[i].parameter.numel() for i in indices], np.int64),
            offsets=np.zeros(len(indices), np.int64),
            bases=np.array(bases, np.uint32),
        )


@dataclass
class _Part:
    backend: ModuleType
    bucket: Bucket
    indices: list[int]
    copied: bool

    def run(self) -> None:
        if not self.copied:
            self.backend.run(self.bucket)
            return
        ((weights, *states),) = self.bucket.planes
        copy = weights[0].contiguous()
        self.bucket.planes = [[(copy, *weights[1:]), *states]]
        self.bucket.prepared = None
        self.backend.run(self.bucket)
        weights[0].copy_(copy)
        self.bucket.planes = [[weights, *states]]


def _planes(each: Participant, recipe: Recipe):
    """For the weights and each state: the format, and its (state key, tensor) pairs."""
    parameter = each.parameter.detach()
    weights = recipe.format_of("weights", parameter)
    extra = [(key, each.state[key]) for key in weights.plane_names("")[1:]]
    planes = [(weights, [("", parameter), *extra])]
    for state in each.rule.states:
        format_ = recipe.format_of(state.role, parameter)
        names = format_.plane_names(state.name)
        planes.append((format_, [(name, each.state[name]) for name in names]))
    return planes


def _signature(each: Participant, planes) -> tuple[Any, ...]:
    parameter = each.parameter
    return (
        parameter.data_ptr(),
        parameter.dtype,
        parameter.device,
        parameter.stride(),
        each.gradient.dtype,
        each.group_index,
        each.rule.name,
        each.key,
        # `state["exp_avg"].data = ...` keeps the tensor and frees the memory that kernels know.
        *((p.data_ptr(), p.dtype, p.shape) for _, named in planes for _, p in named),
    )


def _variant(each: Participant, recipe: Recipe) -> Variant:
    return Variant(
        rule=each.rule,
        weights=recipe.format_of("weights", each.parameter),
        states=tuple(recipe.format_of(s.role, each.parameter) for s in each.rule.states),
        gradient=each.gradient.dtype,
        device=each.parameter.device,
    )


def _scalar_rows(chosen, steps, grad_scale):
    """One row of scalars for each (group, step) that occurs, and each tensor's row."""
    rows: dict[tuple[int, int], int] = {}
    table, row_of = [], np.empty(len(chosen), np.int64)
    for tensor, (each, step) in enumerate(zip(chosen, steps.tolist(), strict=True)):
        key = (each.group_index, step)
        if key not in rows:
            rows[key] = len(table)
            sign = -1.0 if each.group.get("maximize") else 1.0
            try:
                table.append(each.rule.scalars(each.group, step, sign * grad_scale))
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                given = {k: v for k, v in each.group.items() if not k.startswith("param")}
                raise ValueError(
                    f"no step follows from the options of group {each.group_index}: {given}; "
                    "set them to numbers. Nothing was updated"
                ) from error
        row_of[tensor] = rows[key]
    return row_of, np.array(table, np.float64).astype(np.float32)
