"""Which weights something else has written since the last step, by the versions that torch counts.

Kernels write through addresses, so a step raises versions by itself: that of each weight by as much
as the step before. So the sum of all versions says that nothing else has written any of them, and
they are compared one by one only where it is another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import sub

import torch
from torch import Tensor

from torch_bf16.sharding import Parameters, Shard, no_torch_function

from .data_writes import DataWatch

__all__ = ["Snapshot", "Versions"]


@dataclass(slots=True)
class _Steps:
    """Steps that have raised versions alike."""

    count: int = 0


@dataclass(slots=True)
class Snapshot:
    """What a parameter was when the last step had updated it, or its first one was planned.

    Attributes:
        dtype: of the parameter.
        shape: of the parameter.
        data: sees writes that raise no version.
        writes: after how many steps exact weights were last put back, and how often since.
    """

    _base: int
    dtype: torch.dtype
    shape: torch.Size
    data: DataWatch | None = None
    writes: tuple[int, int] = (0, 0)
    _steps: _Steps = field(default_factory=_Steps)
    _raise: int = 0

    @classmethod
    def of(cls, shard: Shard) -> Snapshot:
        """What a parameter is now."""
        return cls(shard.version(), shard.parameter.dtype, shard.parameter.shape)

    @property
    def version(self) -> int:
        """What the last step left as the parameter's version."""
        return self._base + self._raise * self._steps.count

    @version.setter
    def version(self, version: int) -> None:
        self._base = version - self._raise * self._steps.count

    def follow(self, steps: _Steps, raised: int) -> None:
        """Let each of these steps raise the version by so much; none of them is taken yet."""
        self._base, self._steps, self._raise = self.version, steps, raised


class Versions:
    """The versions of some weights, as the last step left them.

    Args:
        parameters: the weights.
        snapshots: of each; their versions follow the steps.
        unseen: whether no step writes any of them in a way that torch sees.
    """

    def __init__(
        self, parameters: Sequence[Tensor], snapshots: Sequence[Snapshot], unseen: bool
    ) -> None:
        self._parameters, self._snapshots, self._unseen = Parameters(parameters), snapshots, unseen
        self._versions = [each.version for each in snapshots]
        # Of all versions, while steps of all weights follow one another.
        self._sum: int | None = None
        self._raise, self._steps = 0, _Steps()

    def changed(self) -> list[int]:
        """Places of the weights that are not what the last step left."""
        if not self._snapshots:
            return []
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
        """Remember what the weights at these places are now."""
        self._compare_each()
        self._note(places, self._parameters.versions())

    def note_step(self, places: Sequence[int], updated: Sequence[Tensor]) -> None:
        """Raise the versions of what a step has updated, which autograd has not seen.

        Args:
            places: of the weights among it.
            updated: all of it.
        """
        if not places:
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
            self._note(places, now)
            if alike:
                self._compare_sum(now, [*map(sub, now, before)])

    def _note(self, places: Sequence[int], now: Sequence[int]) -> None:
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
