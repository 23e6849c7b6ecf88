"""The plan of a step: made once, reused while the same tensors take part.

Parameters are put together into batches that one kernel call updates. Parameter groups do not
separate them: each group's hyperparameters are a row of a small table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter, ne
from typing import Any

import torch
from torch import Tensor

from torch_bf16.backends import ScalarRows, ScalarSource, StepInputs
from torch_bf16.sharding import Span, local

from .batch import Batch, Job, alike
from .guard import Guard
from .member import Member

__all__ = ["Plan"]

_SEEN_VERSION = attrgetter("snapshot.version")


class Plan:
    """Batches and scalars for the parameters that take part in a step.

    Args:
        members: in a fixed order.
        seed: of the noise.
        backend: name of the backend, None for the best that works on each device.
        setting: whatever else the members follow from; :meth:`fits` compares it.
    """

    _guard: Guard

    def __init__(
        self, members: Sequence[Member], seed: int, backend: str | None, setting: Any
    ) -> None:
        self.members = members
        self._setting = setting
        rows = [
            _Row(number, member, _job(member, piece))
            for number, member in enumerate(members)
            for piece in member.shard.span.pieces()
        ]
        one_batch = alike(rows, lambda row: (row.job.variant, row.alone))
        self._parts = [_Part(some, seed, backend) for some in one_batch]
        one_rule = alike(self._parts, lambda part: part.rule_on_device)
        self._sources = [(parts, _source(parts)) for parts in one_rule]

    def watch(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Remember all tensors as they are, once ``optimizer.state`` has the members' states."""
        self._guard = Guard([each.shard for each in self.members], states)

    def fits(
        self, setting: Any, parameters: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Any]]
    ) -> bool:
        """Whether the plan was made for these very tensors: then there is nothing to check.

        Args as for the constructor and :meth:`watch`, as they are now; parameters are those with a
        gradient, in the members' order.
        """
        return setting == self._setting and self._guard.holds(parameters, states)

    def written(self) -> list[Member]:
        """The members whose parameter something else has written since :meth:`note_versions`."""
        seen = map(_SEEN_VERSION, self.members)
        return [*compress(self.members, map(ne, seen, self._guard.versions()))]

    def note_versions(self) -> None:
        """Remember what the last step made of the parameters."""
        for each, version in zip(self.members, self._guard.versions(), strict=True):
            each.snapshot.version = version

    def obstacle_to_capture(self) -> str | None:
        """Why a CUDA graph cannot record a step of this plan, or None where it can."""
        for part in self._parts:
            if not part.batch.backend.capturable:
                return (
                    f"the {part.batch.backend.name} backend reads step numbers and learning rates "
                    "on the host, and replays would repeat this one's; make the optimizer with "
                    "backend='triton'"
                )
            member = part.rows[0].member
            if member.direction is not None:
                return "Muon and Adafactor count their steps on the host; take ordinary steps"
            if not member.shard.memory.is_contiguous():
                return (
                    f"a parameter of shape {tuple(member.parameter.shape)} is not contiguous, and "
                    "its step goes through a copy; make it contiguous"
                )
        for each in self.written():
            if each.formats[0].remainders:
                return (
                    f"a weight of shape {tuple(each.parameter.shape)} was written since the last "
                    "step, and replays would forget the lower half of its master each time; take "
                    "an ordinary step first"
                )
        return None

    def scalars(
        self, groups: Sequence[Mapping[str, Any]], told: StepInputs
    ) -> list[ScalarRows] | None:
        """Each batch's scalars for the next step; None where it is to be skipped.

        Args:
            groups: the optimizer's parameter groups; only hyperparameters are read.
            told: what this step was told.

        Raises:
            ValueError: no step follows from a group's options.
        """
        rows: dict[_Part, ScalarRows] = {}
        for parts, source in self._sources:
            rows.update(zip(parts, source.set(groups, told), strict=True))
        skipped = any(source.skipped for _, source in self._sources)
        return None if skipped else [rows[part] for part in self._parts]

    def run(self, scalars: Sequence[ScalarRows], told: StepInputs) -> None:
        """Take the step: update parameters and states in place, and count it in ``state["step"]``.

        ``scalars`` are those of :meth:`scalars`, for the same ``told``.
        """
        gradients = self._guard.gradients()
        for part, rows in zip(self._parts, scalars, strict=True):
            part.run(gradients, rows, told)
        for _, source in self._sources:
            source.count()


@dataclass(frozen=True, slots=True)
class _Row:
    """A span of a member: one tensor of a batch."""

    number: int
    member: Member
    job: Job

    @property
    def alone(self) -> int | None:
        """What keeps it out of other members' batches.

        A strided parameter goes through a contiguous copy, and what stands for the gradient of a
        whole tensor is as large as it: no more than one of either is to exist at a time.
        """
        plain = self.member.direction is None and self.member.shard.memory.is_contiguous()
        return None if plain else self.number


def _job(member: Member, span: Span) -> Job:
    gradient: Any = member.parameter.grad
    dtype = gradient.dtype if member.direction is None else torch.float32
    tensors = {**member.state, "": member.shard.memory}
    names = ("", *(state.name for state in member.rule.states))
    planes = tuple(
        tuple(
            span.of(local(tensors[key]), plane.block)
            for key, plane in zip(each.plane_names(name), each.planes, strict=True)
        )
        for name, each in zip(names, member.formats, strict=True)
    )
    return Job(span, member.rule, member.formats, planes, dtype)


class _Part:
    """The rows of one batch."""

    def __init__(self, rows: Sequence[_Row], seed: int, backend: str | None) -> None:
        self.batch, self.rows = Batch([row.job for row in rows], seed, backend), rows
        self._seed = seed
        self._numbers = [row.number for row in rows]
        self._whole = all(row.job.span.numel == row.member.shard.memory.numel() for row in rows)
        self._copied = not rows[0].member.shard.memory.is_contiguous()
        variant, backend_name = self.batch.variant, self.batch.backend.name
        self.rule_on_device = (backend_name, variant.rule, variant.device)

    def run(self, gradients: Sequence[Tensor], scalars: ScalarRows, told: StepInputs) -> None:
        """Update the rows; ``gradients`` are all members', of this rank's parts."""
        taken = [gradients[number] for number in self._numbers]
        if not all(map(Tensor.is_contiguous, taken)) or any(map(Tensor.is_neg, taken)):
            # A lazily negated view is contiguous, too, and its memory has the other sign.
            taken = [each.resolve_neg().contiguous() for each in taken]
        member = self.rows[0].member
        if member.direction is not None:
            taken = [member.preprocess(taken[0], told)] * len(taken)
        if not self._whole:
            taken = [row.job.span.of(each) for row, each in zip(self.rows, taken, strict=True)]
        if self._copied:
            (row,) = self.rows
            (weight, *rest), *states = row.job.planes
            copy = weight.contiguous()
            job = replace(row.job, planes=((copy, *rest), *states))
            Batch([job], self._seed, self.batch.backend).run(taken, scalars)
            weight.copy_(copy)
        else:
            self.batch.run(taken, scalars)


def _source(parts: Sequence[_Part]) -> ScalarSource:
    """What computes the scalars of parts that share a rule on a device, and counts their steps."""
    members = [row.member for part in parts for row in part.rows]
    variant = parts[0].batch.variant
    source = parts[0].batch.backend.scalars(
        variant.rule,
        variant.device,
        [len(part.batch) for part in parts],
        [each.group for each in members],
        [each.state["step"] for each in members],
    )
    for each, step in zip(members, source.steps, strict=True):
        each.state["step"] = step
    return source
