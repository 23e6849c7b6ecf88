"""The parts of a plan: the kernel calls of a step, and the sources of their scalars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_bf16.backends import ScalarRows, ScalarSource
from torch_bf16.memory import as_it_lies
from torch_bf16.sharding import Span, as_real, local

from .batch import Batch, Task
from .guard import StepGradients
from .member import Member
from .scratch import Scratch
from .statistics import Statistics

__all__ = ["Active", "Launch", "Row", "source_of"]


@dataclass(frozen=True, slots=True)
class Row:
    """One span of a member, and its task in a batch.

    Attributes:
        number: the member's number in the plan.
        member: the member.
        task: the task that updates the span.
    """

    number: int
    member: Member
    task: Task

    @classmethod
    def of(cls, number: int, member: Member, span: Span) -> Row:
        """Make the row for a span of a member."""
        return cls(number, member, _task(member, span))

    @property
    def alone(self) -> int | None:
        """The member's number if it needs a batch to itself, else None.

        A direction is as large as its tensor: at most one should exist at a time.
        """
        return None if self.member.direction is None else self.number

    @property
    def copied(self) -> bool:
        """Whether the weight is updated through a contiguous copy."""
        return not self.member.in_place


def _task(member: Member, span: Span) -> Task:
    dtype = member.gradient_dtype.to_real() if member.direction is None else torch.float32
    # Separate tensors over the same memory: if the user moves one by .data, the memory that a
    # kernel writes must not be freed.
    tensors = {**member.state, "": member.shard.memory}
    names, order = ("", *(state.name for state in member.rule.states)), member.order
    planes = tuple(
        tuple(
            span.of(as_it_lies(as_real(local(tensors[key]).detach()), order), plane.block)
            for key, plane in zip(format_.plane_names(name), format_.planes, strict=True)
        )
        for name, format_ in zip(names, member.formats, strict=True)
    )
    device = member.shard.memory.device
    return Task(span, member.rule, member.formats, planes, dtype, device, order)


def _with_weight(task: Task, weight: Tensor) -> Task:
    (_, *beside), *states = task.planes
    return replace(task, planes=((weight, *beside), *states))


def _copy_each(to: list[Tensor], of: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, of)  # pyright: ignore[reportPrivateImportUsage]


class _Picked(Sequence[Tensor | None]):
    """A lazy selection of the gradients: most kernels read their addresses instead."""

    def __init__(self, gradients: Sequence[Tensor | None], rows: Sequence[Row]) -> None:
        self._gradients, self._rows = gradients, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        row = self._rows[number]
        gradient = self._gradients[row.number]
        return gradient if gradient is None else as_it_lies(as_real(gradient), row.member.order)


class Launch:
    """The rows that one kernel call updates.

    Attributes:
        rows: the rows, all of one member if it needs a batch to itself.
        batch: their tasks, or tasks of contiguous copies of the weights.
        member_numbers: int64, for each row the number of its member.
        copies: whether each step goes through contiguous copies of the weights.
        has_direction: whether the rule needs whole tensors, and follows a direction.
        reads_in_place: whether the kernel reads gradients where they are.
        has_statistic: whether a statistic is summed over whole tensors before the update.
        in_one_call: whether an interrupt cannot end it halfway: Python raises it when native code
            returns.
        rule_on_device: backend, rule and device: one source of scalars serves all that share them.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        seed: int,
        backend: str | None,
        statistics: Statistics,
        scratch: Scratch,
    ) -> None:
        totals = statistics.totals([row.member for row in rows])
        self.has_statistic = totals is not None
        tasks = [row.task for row in rows]
        self.copies = rows[0].copied
        if self.copies:
            self._weights = [task.planes[0][0] for task in tasks]
            self._copies = scratch.copies_of(self._weights)
            tasks = [*map(_with_weight, tasks, self._copies)]
        self.batch = Batch(tasks, seed, backend, totals)
        self.rows = rows
        self.member_numbers = np.array([row.number for row in rows], np.int64)
        self._whole = all(row.task.span.numel == row.member.shard.memory.numel() for row in rows)
        self.has_direction = rows[0].member.direction is not None
        self.reads_in_place = self._whole and not self.copies and not self.has_direction
        self.in_one_call = (
            self.batch.backend.by_address and not self.batch.staged and not self.copies
        )
        self._known = self.member_numbers, self.member_numbers
        variant, backend_name = self.batch.variant, self.batch.backend.name
        self.rule_on_device = (backend_name, variant.rule, variant.device)

    def measure(self, gradients: StepGradients, scalars: ScalarRows) -> None:
        """Sum the statistic of the rows that have a gradient, before :meth:`run`."""
        self._take(gradients, scalars, reads=True)

    def run(self, gradients: StepGradients, scalars: ScalarRows) -> None:
        """Update the rows that have a gradient; ``gradients`` are those of all members."""
        self._take(gradients, scalars)

    def _take(self, gradients: StepGradients, scalars: ScalarRows, reads: bool = False) -> None:
        picked = _Picked(gradients.tensors, self.rows)
        if gradients.addresses is None:
            copies = [g if g is None else g.resolve_neg().contiguous() for g in picked]
            self._run(copies, scalars, reads)
        elif self.reads_in_place:
            work = self.batch.measure if reads else self.batch.run
            work(picked, scalars, addresses=self.addresses(gradients.addresses))
        else:
            self._run(picked, scalars, reads)

    def follow(self, direction: Tensor, scalars: ScalarRows) -> None:
        """Update the rows, all of one member, along its direction."""
        self._run([direction] * len(self.rows), scalars)

    def _run(
        self, taken: Sequence[Tensor | None], scalars: ScalarRows, reads: bool = False
    ) -> None:
        if not self._whole:
            pairs = zip(self.rows, taken, strict=True)
            taken = [g if g is None else row.task.span.of(g) for row, g in pairs]
        if self.copies:
            _copy_each(self._copies, self._weights)
        if reads:
            self.batch.measure(taken, scalars)
            return
        self.batch.run(taken, scalars)
        if self.copies:
            updated = [gradient is not None for gradient in taken]
            # In one call, which no interrupt ends halfway.
            _copy_each([*compress(self._weights, updated)], [*compress(self._copies, updated)])

    def addresses(self, addresses: np.ndarray) -> np.ndarray:
        """Select the rows' addresses; returns the same array object for the same argument."""
        of_members, of_rows = self._known
        if of_members is not addresses:
            of_rows = addresses[self.member_numbers]
            self._known = addresses, of_rows
        return of_rows


@dataclass(frozen=True)
class Active:
    """The work of a step for its active members.

    Attributes:
        parameters: the parameters of these members.
        with_master: those that have a master, as positions in the list of all members with one.
        launches: the launches in which one of them has a row.
        sources: the sources of scalars that these launches need; with each, all of its launches,
            and a mask of their active rows, None for all.
        has_directions: whether one of the launches follows a direction.
    """

    parameters: list[Tensor]
    with_master: list[int]
    launches: list[Launch]
    sources: list[tuple[list[Launch], ScalarSource, np.ndarray | None]]
    has_directions: bool

    @classmethod
    def of(
        cls,
        is_active: list[bool],
        parameters: Sequence[Tensor],
        with_master: np.ndarray,
        launches: Sequence[Launch],
        sources: Sequence[tuple[list[Launch], ScalarSource]],
    ) -> Active:
        """Select the work for the active members.

        Args:
            is_active: for each member, whether it is active.
            parameters: the parameters of all members.
            with_master: int64, numbers of the members that have a master.
            launches: the launches of all members.
            sources: all sources of scalars, each with its launches.
        """
        mask = np.array(is_active, bool)
        rows = {launch: mask[launch.member_numbers] for launch in launches}
        active_sources = []
        for of_source, source in sources:
            active_rows = np.concatenate([rows[launch] for launch in of_source])
            if active_rows.any():
                mask_of_rows = None if active_rows.all() else active_rows
                active_sources.append((of_source, source, mask_of_rows))
        active = [launch for launch in launches if rows[launch].any()]
        return cls(
            [*compress(parameters, is_active)],
            np.flatnonzero(mask[with_master]).tolist(),
            active,
            active_sources,
            any(launch.has_direction for launch in active),
        )


def source_of(launches: Sequence[Launch]) -> ScalarSource:
    """Make the source of scalars, which also counts steps, for launches of one rule and device."""
    members = [row.member for launch in launches for row in launch.rows]
    variant = launches[0].batch.variant
    source = launches[0].batch.backend.scalars(
        variant.rule,
        variant.device,
        [len(launch.batch) for launch in launches],
        [member.group for member in members],
        [member.state["step"] for member in members],
    )
    for member, step in zip(members, source.steps, strict=True):
        member.state["step"] = step
    return source
