"""The plan of a step: made once, reused while all that takes part is in it.

Parameters are put together into batches that one kernel call updates. Parameter groups do not
separate them: each group's hyperparameters are a row of a small table. A member without a gradient
stays in its batch: its place in the table of gradients says that there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import and_, attrgetter, ne
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_bf16.backends import ScalarRows, ScalarSource, StepInputs
from torch_bf16.backends.host_scalars import evaluate
from torch_bf16.sharding import Span, local

from .batch import Batch, Job, alike
from .guard import Found, Guard
from .member import Member

__all__ = ["Plan"]

_SEEN_VERSION = attrgetter("snapshot.version")


class Plan:
    """Batches and scalars for the parameters that take part in a step, or did before.

    Args:
        members: in a fixed order; all that take part now, and others.
        seed: of the noise.
        backend: name of the backend, None for the best that works on each device.
        setting: whatever else the members follow from; :meth:`fits` compares it.

    Attributes:
        members: all that it knows.
        devices: where they are.
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
        self._selected: _Active | None = None
        self.devices = {part.batch.variant.device for part in self._parts}

    def compile(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Compile the kernels for all that has a gradient, before anything is counted or updated.

        Args:
            groups: the optimizer's parameter groups; only hyperparameters are read.

        Raises:
            ValueError: no step follows from a group's options.
        """
        for part in self._parts:
            there = (row.member for row in part.rows if row.member.parameter.grad is not None)
            if not part.copied and (member := next(there, None)) is not None:
                scalars = evaluate(member.rule, groups[member.group], member.group, 1)
                part.batch.compile(len(scalars))

    def watch(
        self, parameters: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Any]]
    ) -> None:
        """Remember all tensors as they are, once ``optimizer.state`` has the members' states.

        Args:
            parameters: those that take part now.
            states: the optimizer's.
        """
        shards = [each.shard for each in self.members]
        self._guard = Guard(shards, states, [each.gradient for each in self.members])
        self._guard.expect(parameters)

    def fits(
        self, setting: Any, parameters: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Any]]
    ) -> bool:
        """Whether the plan was made for these very tensors: then there is nothing to check.

        Args as for the constructor and :meth:`watch`, as they are now; parameters are those with a
        gradient, in the members' order. They take part from now on.
        """
        return setting == self._setting and self._guard.holds(parameters, states)

    def intact(
        self, setting: Any, states: Mapping[Tensor, Mapping[str, Any]]
    ) -> dict[Tensor, Member]:
        """The members that another plan can take over: nothing of them has changed."""
        if setting != self._setting:
            return {}
        pairs = zip(self.members, self._guard.intact(states), strict=True)
        return {each.parameter: each for each, same in pairs if same}

    def taking_part(self) -> Sequence[Member]:
        """The members that take part in the step."""
        return [*compress(self.members, self._guard.taking_part)]

    def written(self) -> list[Member]:
        """Those of them whose parameter something else has written since :meth:`note_versions`."""
        seen = map(_SEEN_VERSION, self.members)
        written = map(ne, seen, self._guard.versions())
        return [*compress(self.members, map(and_, written, self._guard.taking_part))]

    def note_versions(self) -> None:
        """Remember what the last step made of the parameters that took part."""
        versions = zip(self.members, self._guard.versions(), strict=True)
        for each, version in compress(versions, self._guard.taking_part):
            each.snapshot.version = version

    def obstacle_to_capture(self) -> str | None:
        """Why a CUDA graph cannot record a step of this plan, or None where it can."""
        for part in self._active().parts:
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
        active, rows = self._active(), {}
        started: list[ScalarSource] = []
        try:
            for parts, source, there in active.sources:
                rows.update(zip(parts, source.set(groups, told, there), strict=True))
                started.append(source)
        except BaseException:
            # A device has counted the step already.
            for source in started:
                source.count(np.zeros(len(source.steps), bool))
            raise
        skipped = any(source.skipped for source in started)
        return None if skipped else [rows[part] for part in active.parts]

    def run(self, scalars: Sequence[ScalarRows], told: StepInputs) -> None:
        """Take the step: update parameters and states in place, and count it in ``state["step"]``.

        ``scalars`` are those of :meth:`scalars`, for the same ``told``. Where a part of the step
        fails, what was updated before it is counted, nothing else, and the error says how much.
        """
        active, found = self._active(), self._guard.gradients()
        if any(part.rows[0].member.direction is not None for part in active.parts):
            told = told.on_host()
        done: set[_Part] = set()
        try:
            for part, rows in zip(active.parts, scalars, strict=True):
                part.run(found, rows, told)
                done.add(part)
        except BaseException as error:
            for parts, source, _ in active.sources:
                flags = [np.full(len(part.rows), part in done) for part in parts]
                source.count(np.concatenate(flags))
            _say_what_was_updated(error, {row.number for part in done for row in part.rows})
            raise
        for _, source, _ in active.sources:
            source.count()

    def _active(self) -> _Active:
        """What there is to do for the members that take part."""
        flags = self._guard.taking_part
        if self._selected is None or self._selected.flags is not flags:
            self._selected = _Active.of(flags, self._parts, self._sources)
        return self._selected


def _say_what_was_updated(error: BaseException, updated: set[int]) -> None:
    if isinstance(error, Exception):
        what = f"{len(updated)} parameters were updated and their steps counted, the others not"
        said = f"{error}".rstrip(".") or type(error).__name__
        error.args = (f"{said}. {what if updated else 'Nothing was updated'}",)


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
    dtype = member.gradient if member.direction is None else torch.float32
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
    """The rows of one batch.

    Attributes:
        numbers: int64, of the member of each row.
        copied: whether each step goes through a contiguous copy.
    """

    def __init__(self, rows: Sequence[_Row], seed: int, backend: str | None) -> None:
        self.batch, self.rows = Batch([row.job for row in rows], seed, backend), rows
        self._seed = seed
        self.numbers = np.array([row.number for row in rows], np.int64)
        self._whole = all(row.job.span.numel == row.member.shard.span.numel for row in rows)
        self.copied = not rows[0].member.shard.memory.is_contiguous()
        self._direct = self._whole and not self.copied and rows[0].member.direction is None
        variant, backend_name = self.batch.variant, self.batch.backend.name
        self.rule_on_device = (backend_name, variant.rule, variant.device)

    def run(self, found: Found, scalars: ScalarRows, told: StepInputs) -> None:
        """Update the rows that have a gradient; ``found`` are all members' gradients."""
        taken = [found.gradients[number] for number in self.numbers]
        if found.addresses is None:
            taken = [each if each is None else each.resolve_neg().contiguous() for each in taken]
        elif self._direct:
            self.batch.run(taken, scalars, addresses=found.addresses[self.numbers])
            return
        (row, *_) = self.rows
        if row.member.direction is not None and taken[0] is not None:
            taken = [row.member.preprocess(taken[0], told)] * len(taken)
        if not self._whole:
            pairs = zip(self.rows, taken, strict=True)
            taken = [each if each is None else row.job.span.of(each) for row, each in pairs]
        if self.copied:
            (weight, *rest), *states = row.job.planes
            copy = weight.contiguous()
            job = replace(row.job, planes=((copy, *rest), *states))
            Batch([job], self._seed, self.batch.backend).run(taken, scalars)
            weight.copy_(copy)
        else:
            self.batch.run(taken, scalars)


@dataclass(frozen=True)
class _Active:
    """What there is to do where some of the members take part.

    Attributes:
        flags: for each member, whether it does.
        parts: those with such a member.
        sources: the scalars of those; for each the parts, and which of their rows take part, None
            for all.
    """

    flags: list[bool]
    parts: list[_Part]
    sources: list[tuple[list[_Part], ScalarSource, np.ndarray | None]]

    @classmethod
    def of(
        cls,
        flags: list[bool],
        parts: Sequence[_Part],
        sources: Sequence[tuple[list[_Part], ScalarSource]],
    ) -> _Active:
        there = np.array(flags, bool)
        rows = {part: there[part.numbers] for part in parts}
        found = []
        for its, source in sources:
            which = np.concatenate([rows[part] for part in its])
            if which.any():
                found.append((its, source, None if which.all() else which))
        return cls(flags, [part for part in parts if rows[part].any()], found)


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
