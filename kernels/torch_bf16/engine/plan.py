"""The plan of a step: made once, reused while the same tensors take part.

Parameters are put together into batches that one kernel call updates. Parameter groups do not
separate them: each group's hyperparameters are a row of a small table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter, ne
from typing import Any

import torch
from torch import Tensor

from torch_bf16.backends import ScalarRows, ScalarSource, StepInputs
from torch_bf16.sharding import Span

from .batch import Batch, Job, by_variant
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
            _Row(number, member, piece)
            for number, member in enumerate(members)
            for piece in member.shard.span.pieces()
        ]
        jobs = [row.job() for row in rows]
        self._parts = [
            _Part([jobs[n] for n in numbers], [rows[n] for n in numbers], seed, backend)
            for numbers in by_variant(jobs, [row.alone for row in rows])
        ]
        self._scalars = [_Scalars(parts) for parts in _by_rule(self._parts)]

    def watch(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Remember all tensors as they are, once the optimizer keeps the members' states.

        Args:
            states: ``optimizer.state``.
        """
        self._guard = Guard([each.shard for each in self.members], states)

    def fits(
        self, setting: Any, parameters: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Any]]
    ) -> bool:
        """Whether the plan was made for these very tensors: then there is nothing to check.

        Args:
            setting: as it was given to the constructor, now.
            parameters: those with a gradient, in the members' order.
            states: ``optimizer.state``.
        """
        return setting == self._setting and self._guard.holds(parameters, states)

    def written(self) -> list[Member]:
        """The members whose parameter something else has written since :meth:`note_versions`."""
        return [
            *compress(
                self.members, map(ne, map(_SEEN_VERSION, self.members), self._guard.versions())
            )
        ]

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
        for each in self._scalars:
            rows.update(each.set(groups, told))
        skipped = any(each.source.skipped for each in self._scalars)
        return None if skipped else [rows[part] for part in self._parts]

    def run(self, scalars: Sequence[ScalarRows], told: StepInputs) -> None:
        """Take the step: update parameters and states in place, and count it in ``state["step"]``.

        Args:
            scalars: of :meth:`scalars`.
            told: what this step was told.
        """
        gradients = self._guard.gradients()
        for part, rows in zip(self._parts, scalars, strict=True):
            part.run(gradients, rows, told)
        for each in self._scalars:
            each.source.count()


@dataclass(frozen=True, slots=True)
class _Row:
    """A span of a member: one tensor of a batch."""

    number: int
    member: Member
    span: Span

    @property
    def alone(self) -> int | None:
        """What keeps it out of other members' batches.

        A strided parameter goes through a contiguous copy, and what stands for the gradient of a
        whole tensor is as large as it: no more than one of either is to exist at a time.
        """
        plain = self.member.direction is None and self.member.shard.memory.is_contiguous()
        return None if plain else self.number

    def job(self) -> Job:
        member = self.member
        gradient: Any = member.parameter.grad
        dtype = gradient.dtype if member.direction is None else torch.float32
        tensors = {**member.state, "": member.parameter.detach()}
        return Job.of(self.span, member.rule, member.formats, tensors, dtype)


class _Part:
    """The rows of one batch."""

    def __init__(
        self, jobs: Sequence[Job], rows: Sequence[_Row], seed: int, backend: str | None
    ) -> None:
        self.batch, self.rows = Batch(jobs, seed, backend), rows
        self._jobs, self._seed = jobs, seed
        self._numbers = [row.number for row in rows]
        self._whole = all(row.span.numel == row.member.shard.memory.numel() for row in rows)
        self._copied = not rows[0].member.shard.memory.is_contiguous()

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
            taken = [row.span.of(each) for row, each in zip(self.rows, taken, strict=True)]
        if self._copied:
            self._run_on_a_copy(taken, scalars)
        else:
            self.batch.run(taken, scalars)

    def _run_on_a_copy(self, gradients: Sequence[Tensor], scalars: ScalarRows) -> None:
        (job,) = self._jobs
        (weight, *rest), *states = job.planes
        copy = weight.contiguous()
        job = replace(job, planes=((copy, *rest), *states))
        Batch([job], self._seed, self.batch.backend).run(gradients, scalars)
        weight.copy_(copy)


def _by_rule(parts: Sequence[_Part]) -> list[list[_Part]]:
    """The parts that share a rule on a device: one call computes the scalars of all of them."""
    alike: dict[Any, list[_Part]] = defaultdict(list)
    for each in parts:
        variant = each.batch.variant
        alike[each.batch.backend.name, variant.rule, variant.device].append(each)
    return list(alike.values())


class _Scalars:
    """The scalars of parts that share a rule on a device, and what counts their steps."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts
        members = [row.member for part in parts for row in part.rows]
        variant = parts[0].batch.variant
        self.source: ScalarSource = parts[0].batch.backend.scalars(
            variant.rule,
            variant.device,
            [len(part.batch) for part in parts],
            [each.group for each in members],
            [each.state["step"] for each in members],
        )
        for each, step in zip(members, self.source.steps, strict=True):
            each.state["step"] = step

    def set(
        self, groups: Sequence[Mapping[str, Any]], told: StepInputs
    ) -> Iterable[tuple[_Part, ScalarRows]]:
        """Each part's rows for the next step."""
        return zip(self._parts, self.source.set(groups, told), strict=True)
