"""The plan of a step: made once, reused while it covers every parameter that has a gradient.

Parameters are combined into batches, each of which one kernel call updates. A batch may span
parameter groups: each group's hyperparameters are a row of a small table. A member without a
gradient stays in its batch: a null entry in the table of gradients tells the kernel to skip it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
from torch import Tensor

from torch_bf16.backends import ScalarRows, ScalarSource, StepInputs, holding
from torch_bf16.backends.host_scalars import evaluate
from torch_bf16.sharding import Shard

from . import data_writes
from .batch import alike
from .direction_solver import DirectionSolver
from .guard import Guard, StepGradients
from .launches import Active, Launch, Row, source_of
from .member import Member
from .ownership import Round
from .progress import Progress
from .recording import Recording
from .scratch import Scratch, in_turns
from .setting import Setting
from .statistics import Statistics
from .versions import Versions

__all__ = ["Plan"]

# How many sets of active members are cached.
_CACHED_SETS = 8


class Plan:
    """Batches and scalars for the parameters that are active in a step, or were before.

    A member is active in a step if it has a gradient then.

    Args:
        members: in a fixed order; all that are active now, and possibly others.
        seed: seed of the noise.
        backend: name of the backend, None for the best that works on each device.
        setting: what the members depend on besides memory; :meth:`fits` compares it.
        rounds: exchanges between ranks, for rules that need whole tensors.
        sharded: see :class:`.statistics.Statistics`.

    Attributes:
        members: all members of the plan.
        devices: the devices that the members are on.
        backends: names of the backends that run the kernels, in order.
    """

    _guard: Guard

    def __init__(
        self,
        members: Sequence[Member],
        seed: int,
        backend: str | None,
        setting: Setting,
        rounds: Sequence[Round],
        sharded: Sequence[Shard],
    ) -> None:
        self.members = members
        self._parameters = [member.parameter for member in members]
        # Writes to weights matter, and are detected, only for exact masters.
        self._with_master = np.flatnonzero([member.has_master for member in members])
        self._setting = setting
        rows = [
            Row.of(number, member, part)
            for number, member in enumerate(members)
            for span in member.shard.spans
            for part in span.split()
        ]
        self._statistics = sums = Statistics(members, sharded)
        batches = alike(
            rows,
            lambda row: (row.task.variant, row.alone, row.copied, sums.place_of(row.member)),
        )
        scratch = Scratch()
        self._launches = [
            Launch(some, seed, backend, sums, scratch) for each in batches for some in _turns(each)
        ]
        watched = [member for member in members if member.has_master]
        self._versions = Versions(
            [member.parameter for member in watched],
            [member.snapshot for member in watched],
            unseen=all(
                launch.batch.backend.by_address and not launch.copies for launch in self._launches
            ),
        )
        one_rule = alike(self._launches, lambda launch: launch.rule_on_device)
        self._sources = [(launches, source_of(launches)) for launches in one_rule]
        self._solver = DirectionSolver(members, rounds, sums.groups)
        self._sets: dict[bytes, Active] = {}
        self._selected: tuple[list[bool], Any] = [], None
        self.devices = {launch.batch.variant.device for launch in self._launches}
        self.backends = sorted({launch.batch.backend.name for launch in self._launches})

    def compile(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Compile the kernels of all members with gradients, before anything is updated or counted.

        Args:
            groups: the optimizer's parameter groups; only hyperparameters are read.

        Raises:
            ValueError: a group's options are invalid.
        """
        for launch in self._launches:
            present = (row.member for row in launch.rows if row.member.parameter.grad is not None)
            if (member := next(present, None)) is not None:
                scalars = evaluate(member.rule, groups[member.group], member.group, 1)
                launch.batch.compile(len(scalars))

    def watch(self, states: dict[Tensor, Any]) -> None:
        """Record where all tensors are, once ``optimizer.state`` has the members' states.

        Members with a gradient are active in the next step.
        """
        self._guard = Guard(self.members, states)

    def fits(
        self,
        setting: Setting,
        parameters: Sequence[Tensor],
        states: dict[Tensor, Any],
    ) -> bool:
        """Check that the plan is still valid for exactly these tensors, and needs no other check.

        Members with a gradient are active from now on.

        Args:
            setting: the current one; compared with the constructor's by identity.
            parameters: all that may have a gradient, in the members' order.
            states: the current ``optimizer.state``.
        """
        return setting is self._setting and self._guard.holds(parameters, states)

    def intact(self, setting: Setting, states: dict[Tensor, Any]) -> dict[Tensor, Member]:
        """The members that the next plan can reuse, because nothing about them has changed."""
        if setting is not self._setting:
            return {}
        pairs = zip(self.members, self._guard.intact(states), strict=True)
        return {member.parameter: member for member, same in pairs if same}

    @property
    def is_active(self) -> list[bool]:
        """For each member, whether it is active; a new list object whenever this changes."""
        return self._guard.is_active

    def active_members(self) -> Sequence[Member]:
        """The active members."""
        return [*compress(self.members, self._guard.is_active)]

    def active_parameters(self) -> Sequence[Tensor]:
        """The parameters of :meth:`active_members`."""
        return self._active().parameters

    def overwritten_members(self) -> list[Member]:
        """The active members whose remainder is void, because something else wrote the weight.

        Writes count since the last :meth:`note_step` or :meth:`note_versions`.
        """
        changed = self._versions.changed()
        if not changed:
            return []
        numbers = [self._with_master[n] for n in changed]
        return [self.members[n] for n in numbers if self.is_active[n]]

    def note_versions(self) -> None:
        """Record the current versions of the active members."""
        self._versions.note(self._active().with_master)

    def note_step(self) -> None:
        """Tell autograd which weights the kernels have written, and record their new versions."""
        active = self._active()
        self._versions.note_step(active.with_master, active.parameters)
        self._guard.forget_gradients()
        written = compress(self.members, self.is_active)
        data_writes.note_step(member.snapshot.data for member in written)

    def obstacle_to_capture(self) -> str | None:
        """Why a CUDA graph cannot record a step of this plan, or None if it can."""
        if self._statistics.groups:
            return (
                "cautious and update_clipping add up numbers of all ranks within a step of "
                "sharded parameters, which has not been tried in a graph; take ordinary steps"
            )
        for launch in self._active().launches:
            if launch.batch.staged:
                return (
                    "its states are in host memory, and their copies run in streams of their own; "
                    "take ordinary steps, or leave offload='states' out of the recipe"
                )
            if not launch.batch.backend.capturable:
                return (
                    f"the {launch.batch.backend.name} backend reads step numbers and learning "
                    "rates on the host, and replays would repeat this one's; make the optimizer "
                    "with backend='triton'"
                )
            member = launch.rows[0].member
            if member.direction is not None:
                return "Muon and Adafactor count their steps on the host; take ordinary steps"
            if launch.copies:
                return (
                    f"a parameter of shape {tuple(member.parameter.shape)} and strides "
                    f"{member.parameter.stride()} is not contiguous, and its step goes through a "
                    "copy; make it contiguous"
                )
        for member in self.overwritten_members():
            return (
                f"a weight of shape {tuple(member.parameter.shape)} was written since the last "
                "step, and replays would forget the remainder of its master each time; take an "
                "ordinary step first"
            )
        return None

    def scalars(
        self, groups: Sequence[Mapping[str, Any]], inputs: StepInputs
    ) -> list[ScalarRows] | None:
        """Compute each batch's scalars for the next step; None if the step is to be skipped.

        Ranks that exchange matrices first agree on whether to skip the step.

        Args:
            groups: the optimizer's parameter groups; only hyperparameters are read.
            inputs: inputs of this step.

        Raises:
            ValueError: a group's options are invalid.
        """
        self._solver.agree(inputs)
        active, rows, skipped = self._active(), {}, False
        started: list[ScalarSource] = []
        try:
            for launches, source, is_active in active.sources:
                rows.update(zip(launches, source.set(groups, inputs, is_active), strict=True))
                started.append(source)
                skipped |= source.skipped
        except BaseException:
            # Devices have already counted this step: undo it.
            for source in started:
                source.count(np.zeros(len(source.steps), bool))
            raise
        return None if skipped else [rows[launch] for launch in active.launches]

    def run(self, scalars: Sequence[ScalarRows], inputs: StepInputs) -> None:
        """Take the step: update parameters and states in place, and count it in ``state["step"]``.

        If it fails midway, only the steps of parameters that were updated are counted, and the
        error says how many these are.

        Args:
            scalars: what :meth:`scalars` returned for the same ``inputs``.
            inputs: inputs of this step.
        """
        active, gradients = self._active(), self._guard.gradients()
        if active.has_directions:
            inputs = inputs.on_host()
        progress = Progress()
        try:
            with holding(self.devices):
                if self._statistics:
                    self._statistics.clear()
                    for launch, rows in zip(active.launches, scalars, strict=True):
                        if launch.has_statistic:
                            launch.measure(gradients, rows)
                    self._statistics.reduce()
                self._run(active, gradients, scalars, inputs, progress)
        except BaseException as error:
            done = progress.done
            for launches, source, _ in active.sources:
                updated = [np.full(len(launch.rows), launch in done) for launch in launches]
                source.count(np.concatenate(updated))
            for member in (launch.rows[0].member for launch in done):
                if member.direction is not None:
                    member.steps = int(member.state["step"])
                    member.direction.store()
            progress.tell(error, self._solver.prepared)
            self._solver.prepared.clear()
            raise
        for _, source, _ in active.sources:
            source.count()

    def _run(
        self,
        active: Active,
        gradients: StepGradients,
        scalars: Sequence[ScalarRows],
        inputs: StepInputs,
        progress: Progress,
    ) -> None:
        waiting = {}
        for launch, rows in zip(active.launches, scalars, strict=True):
            if launch.has_direction:
                waiting[launch.rows[0].number] = launch, rows
                if rows.steps is not None:
                    # Somebody may have written ``state["step"]``.
                    launch.rows[0].member.steps = int(rows.steps[0]) - 1
            else:
                progress.carry_out(launch, launch.run, gradients, rows)
        if waiting:
            directions = self._solver.run(self.is_active, gradients.tensors, inputs)
            for number, direction in directions:
                launch, rows = waiting[number]
                progress.carry_out(launch, launch.follow, direction, rows)
                # Free it before the next one is computed.
                del direction

    def record(self, groups: Sequence[Mapping[str, Any]]) -> Recording:
        """Record a step of the active members, with their current gradients, in a CUDA graph.

        The caller must check that there is no :meth:`obstacle_to_capture`, and before each replay
        that no tensor has moved. Args and errors as for :class:`.recording.Recording`.
        """
        return Recording(self._active(), self._guard.gradients(), groups, self._statistics)

    def suits(self, recording: Recording) -> bool:
        """Check that gradients are where a recording reads them; call :meth:`fits` first."""
        return recording.reads(self._guard.gradients())

    def _active(self) -> Active:
        """The work of a step for the active members, cached by the set of them."""
        is_active, active = self._selected
        if is_active is not self._guard.is_active:
            is_active = self._guard.is_active
            key = bytes(is_active)
            if key not in self._sets:
                # Experts, dropped layers and alternating freezes reuse a few sets.
                if len(self._sets) == _CACHED_SETS:
                    self._sets.clear()
                self._sets[key] = Active.of(
                    is_active,
                    self._parameters,
                    self._with_master,
                    self._launches,
                    self._sources,
                )
            active = self._sets[key]
            self._selected = is_active, active
        return active


def _turns(rows: list[Row]) -> list[list[Row]]:
    """The rows that can share a launch: of weights that are copied, only some at a time."""
    return in_turns(rows, lambda row: row.task.span.numel) if rows[0].copied else [rows]
