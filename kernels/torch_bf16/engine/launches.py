"""What a plan is made of: the kernel calls of a step, and the scalars that they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_bf16.backends import ScalarRows, ScalarSource
from torch_bf16.sharding import Span, local

from .batch import Batch, Job
from .guard import StepGradients
from .member import Member
from .statistics import Statistics

__all__ = ["Active", "Launch", "Row", "source_of"]


@dataclass(frozen=True, slots=True)
class Row:
    """A span of a member: one tensor of a batch.

    Attributes:
        number: of the member in the plan.
        member: that.
        job: what the batch takes.
    """

    number: int
    member: Member
    job: Job

    @classmethod
    def of(cls, number: int, member: Member, span: Span) -> Row:
        """The row of a member's span."""
        return cls(number, member, _job(member, span))

    @property
    def alone(self) -> int | None:
        """The member's number if it must have a batch of its own, else None.

        A strided parameter is stepped as a contiguous copy, and a direction is as large as its
        tensor: at most one of either should exist at a time.
        """
        plain = self.member.direction is None and self.member.shard.memory.is_contiguous()
        return None if plain else self.number


def _job(member: Member, span: Span) -> Job:
    dtype = member.gradient_dtype if member.direction is None else torch.float32
    # Tensors of its own over the same memory: moving one by .data must not free what a kernel
    # writes.
    tensors = {**member.state, "": member.shard.memory}
    names = ("", *(state.name for state in member.rule.states))
    planes = tuple(
        tuple(
            span.of(local(tensors[key]).detach(), plane.block)
            for key, plane in zip(each.plane_names(name), each.planes, strict=True)
        )
        for name, each in zip(names, member.formats, strict=True)
    )
    return Job(span, member.rule, member.formats, planes, dtype, member.shard.memory.device)


class _Picked(Sequence[Tensor | None]):
    """Some of the gradients: picked where they are asked for, as most kernels read addresses."""

    def __init__(self, gradients: Sequence[Tensor | None], places: Sequence[int]) -> None:
        self._gradients, self._places = gradients, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: Any) -> Any:
        return self._gradients[self._places[number]]


class Launch:
    """Rows that one kernel call updates.

    Attributes:
        batch: what the kernel takes.
        numbers: int64, of the member of each row.
        copies: whether each step goes through a contiguous copy.
        has_direction: whether its rule looks at a whole tensor first.
        reads_in_place: whether kernels read gradients where they are.
        has_statistic: whether its rule's statistic is summed first.
    """

    def __init__(
        self, rows: Sequence[Row], seed: int, backend: str | None, statistics: Statistics
    ) -> None:
        self._totals = statistics.totals([row.member for row in rows])
        self.has_statistic = self._totals is not None
        self.batch = Batch([row.job for row in rows], seed, backend, self._totals)
        self._seed, self.rows = seed, rows
        self.numbers = np.array([row.number for row in rows], np.int64)
        self._whole = all(row.job.span.numel == row.member.shard.memory.numel() for row in rows)
        self.copies = not rows[0].member.shard.memory.is_contiguous()
        self.has_direction = rows[0].member.direction is not None
        self.reads_in_place = self._whole and not self.copies and not self.has_direction
        self._places: list[int] = self.numbers.tolist()
        self._known = self.numbers, self.numbers
        variant, backend_name = self.batch.variant, self.batch.backend.name
        self.rule_on_device = (backend_name, variant.rule, variant.device)

    def measure(self, gradients: StepGradients, scalars: ScalarRows) -> None:
        """Sum the statistic of the rows that have a gradient, before :meth:`run`."""
        self._take(gradients, scalars, reads=True)

    def run(self, gradients: StepGradients, scalars: ScalarRows) -> None:
        """Update the rows that have a gradient; ``gradients`` are all members' gradients."""
        self._take(gradients, scalars)

    def _take(self, gradients: StepGradients, scalars: ScalarRows, reads: bool = False) -> None:
        taken: Sequence[Tensor | None] = _Picked(gradients.tensors, self._places)
        if gradients.addresses is None:
            taken = [each if each is None else each.resolve_neg().contiguous() for each in taken]
        elif self.reads_in_place:
            work = self.batch.measure if reads else self.batch.run
            work(taken, scalars, addresses=self.addresses(gradients.addresses))
            return
        self._run(taken, scalars, reads)

    def follow(self, direction: Tensor, scalars: ScalarRows) -> None:
        """Update the rows, all of one member, given its direction."""
        self._run([direction] * len(self.rows), scalars)

    def _run(
        self, taken: Sequence[Tensor | None], scalars: ScalarRows, reads: bool = False
    ) -> None:
        (row, *_) = self.rows
        if not self._whole:
            pairs = zip(self.rows, taken, strict=True)
            taken = [each if each is None else row.job.span.of(each) for row, each in pairs]
        batch = self.batch
        if self.copies:
            (weight, *beside), *states = row.job.planes
            copy = weight.contiguous()
            job = replace(row.job, planes=((copy, *beside), *states))
            batch = Batch([job], self._seed, batch.backend, self._totals)
        if reads:
            batch.measure(taken, scalars)
            return
        batch.run(taken, scalars)
        if self.copies:
            weight.copy_(copy)

    def addresses(self, addresses: np.ndarray) -> np.ndarray:
        """Those of the rows; the same array for the same one."""
        of_all, mine = self._known
        if of_all is not addresses:
            mine = addresses[self.numbers]
            self._known = addresses, mine
        return mine


@dataclass(frozen=True)
class Active:
    """What there is to do where some of the members take part.

    Attributes:
        parameters: theirs.
        with_master: places of those that have a master, among all such members.
        launches: those with such a member.
        sources: the scalars of those; for each the launches, and which of their rows take part,
            None for all.
        has_directions: whether a rule among them looks at a whole tensor first.
    """

    parameters: list[Tensor]
    with_master: list[int]
    launches: list[Launch]
    sources: list[tuple[list[Launch], ScalarSource, np.ndarray | None]]
    has_directions: bool

    @classmethod
    def of(
        cls,
        taking_part: list[bool],
        parameters: Sequence[Tensor],
        with_master: np.ndarray,
        launches: Sequence[Launch],
        sources: Sequence[tuple[list[Launch], ScalarSource]],
    ) -> Active:
        """What there is to do where some of all members take part.

        Args:
            taking_part: for each member whether it does.
            parameters: of each member.
            with_master: int64, numbers of the members that have a master.
            launches: of all members.
            sources: the scalars of the launches.
        """
        mask = np.array(taking_part, bool)
        rows = {launch: mask[launch.numbers] for launch in launches}
        active_sources = []
        for some, source in sources:
            which = np.concatenate([rows[launch] for launch in some])
            if which.any():
                active_sources.append((some, source, None if which.all() else which))
        active = [launch for launch in launches if rows[launch].any()]
        return cls(
            [*compress(parameters, taking_part)],
            np.flatnonzero(mask[with_master]).tolist(),
            active,
            active_sources,
            any(each.has_direction for each in active),
        )


def source_of(launches: Sequence[Launch]) -> ScalarSource:
    """What computes the scalars of launches that share a rule on a device, and counts steps."""
    members = [row.member for launch in launches for row in launch.rows]
    variant = launches[0].batch.variant
    source = launches[0].batch.backend.scalars(
        variant.rule,
        variant.device,
        [len(launch.batch) for launch in launches],
        [each.group for each in members],
        [each.state["step"] for each in members],
    )
    for each, step in zip(members, source.steps, strict=True):
        each.state["step"] = step
    return source
