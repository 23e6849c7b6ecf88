"""Finds weights that something else has written since the last step, by torch's version counters.

Kernels write through addresses, so a step raises the versions itself: each weight's by the same
amount as in the step before. If the sum of all versions is the expected one, nothing else has
written a weight; only otherwise are versions compared one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, count
from operator import ne, sub
from typing import Any

import torch
from torch import Tensor

from torch_bf16.sharding import Parameters, Shard, no_torch_function

from .data_writes import DataWatch

__all__ = ["Snapshot", "Versions"]


@dataclass(slots=True)
class _Steps:
    """A run of steps, each of which raised the versions by the same amounts."""

    count: int = 0


@dataclass(slots=True)
class Snapshot:
    """A parameter as the last step left it, or as it was when its first step was planned.

    Attributes:
        dtype: of the parameter.
        shape: of the parameter.
        masters: the planes of the parameter's master then, which outlive its state.
        data: sees writes that raise no version.
        writes: the step after which an exact weight was last set, and a count of such writes.
    """

    _base: int
    dtype: torch.dtype
    shape: torch.Size
    masters: Mapping[str, Any] = field(default_factory=dict)
    data: DataWatch | None = None
    writes: tuple[int, int] = (0, 0)
    _steps: _Steps = field(default_factory=_Steps)
    _raise: int = 0

    @classmethod
    def of(cls, shard: Shard) -> Snapshot:
        """A snapshot of a parameter as it is now."""
        return cls(shard.version(), shard.parameter.dtype, shard.parameter.shape)

    @property
    def version(self) -> int:
        """The parameter's version after the last step."""
        return self._base + self._raise * self._steps.count

    @version.setter
    def version(self, version: int) -> None:
        self._base = version - self._raise * self._steps.count

    def follow(self, steps: _Steps, raised: int) -> None:
        """Let each of these steps, none of which is taken yet, raise the version by ``raised``."""
        self._base, self._steps, self._raise = self.version, steps, raised


class Versions:
    """The versions of weights, as the last step left them.

    Args:
        parameters: the weights.
        snapshots: one for each weight; their versions follow the steps.
        unseen: whether steps write all weights through addresses, which raises no version.
    """

    def __init__(
        self, parameters: Sequence[Tensor], snapshots: Sequence[Snapshot], unseen: bool
    ) -> None:
        self._parameters, self._snapshots, self._unseen = Parameters(parameters), snapshots, unseen
        self._versions = [each.version for each in snapshots]
        # Places of the weights that were written before the step.
        self._changed: list[int] = []
        # The expected sum of all versions, as long as every step updates all weights.
        self._sum: int | None = None
        self._raise, self._steps = 0, _Steps()

    def changed(self) -> list[int]:
        """Places of the weights that were written since the last step."""
        self._changed = self._find_changed() if self._snapshots else []
        return self._changed

    def _find_changed(self) -> list[int]:
        if self._sum is not None:
            # torch lowers no version.
            if self._parameters.sum_of_versions() == self._sum:
                return []
            self._compare_each()
        now = self._parameters.versions()
        if now == self._versions:
            return []
        pairs = zip(now, self._snapshots, strict=True)
        return [place for place, (version, each) in enumerate(pairs) if version != each.version]

    def note(self, places: Sequence[int]) -> None:
        """Record the present versions of the weights at these places."""
        self._compare_each()
        self._note(places, self._parameters.versions())

    def note_step(self, places: Sequence[int], updated: Sequence[Tensor]) -> None:
        """Raise the versions of the parameters that a step has updated unseen by autograd.

        The views of one tensor have one version. Those that the step has left alone are not
        written by it, so their new version is recorded, too; call :meth:`changed` before the step.

        Args:
            places: of the weights among them that are followed here.
            updated: all of them.
        """
        if not self._snapshots:
            _raise_versions(updated)
        elif self._sum is not None and len(places) == len(self._snapshots):
            _raise_versions(updated)
            self._sum += self._raise
            self._steps.count += 1
        else:
            self._compare_each()
            alike = self._unseen and len(places) == len(self._snapshots)
            before = self._parameters.versions() if alike else []
            _raise_versions(updated)
            now = self._parameters.versions()
            raised = compress(count(), map(ne, now, self._versions))
            self._note({*raised}.difference(self._changed).union(places), now)
            if alike:
                self._compare_sum(now, [*map(sub, now, before)])

    def _note(self, places: Iterable[int], now: Sequence[int]) -> None:
        for place in places:
            version = self._versions[place] = now[place]
            self._snapshots[place].version = version

    def _compare_sum(self, now: Sequence[int], raised: Sequence[int]) -> None:
        self._sum, self._raise, self._steps = sum(now), sum(raised), _Steps()
        for snapshot, each in zip(self._snapshots, raised, strict=True):
            snapshot.follow(self._steps, each)

    def _compare_each(self) -> None:
        if self._sum is not None:
            self._sum = None
            self._versions = [each.version for each in self._snapshots]


def _raise_versions(tensors: Sequence[Tensor]) -> None:
    with no_torch_function():
        torch.autograd.graph.increment_version(tensors)
