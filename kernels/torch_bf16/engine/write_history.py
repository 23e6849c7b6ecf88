"""What an optimizer has seen of others' writes to its weights: what its warnings go by."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from torch_bf16.sharding import Shard

from .data_writes import Counting, WriteCounts

__all__ = ["Counted", "WriteHistory"]

# A warning names writes in place before so many steps of a window, as by a Lookahead: loading, or
# making weights anew, is rarer. Only the first steps of a run are observed: it takes a pass over
# the weights.
_BLENDED_STEPS, _STEPS_IN_WINDOW, _OBSERVED_STEPS = 4, 64, 256
# Replicas are averaged after hundreds of steps, too: copies this far apart are observed in all of a
# run, and count if they move numbers by a few spacings.
_STEPS_APART = 32


class Counted(NamedTuple):
    """A step before which weights were written, with counts that a GPU may still be at.

    Attributes:
        step: its number.
        rare: whether nothing is known to have written weights in the steps before it.
        shared: the weights that another optimizer had stepped.
        counting: what was written.
    """

    step: int
    rare: bool
    shared: list[Shard]
    counting: Counting


class WriteHistory:
    """The writes by others to the weights of one optimizer.

    Attributes:
        unread: the latest steps whose counts are not known yet.
        warned: whether a warning has said what a write loses.
        warned_of_second_master: whether a warning has said what a second optimizer of a weight
            loses.
    """

    def __init__(self) -> None:
        self.unread: deque[Counted] = deque()
        self.warned = self.warned_of_second_master = False
        self._written_step = 0
        self._blended_steps: list[int] = []
        self._rare_blends = 0

    def note(self, step: int) -> None:
        """Note that something has written weights before this step."""
        self._written_step = step

    def is_rare(self, step: int) -> bool:
        """Whether nothing is known to have written weights in the steps before this one."""
        return step - self._written_step >= _STEPS_APART

    def is_observed(self, step: int) -> bool:
        """Whether numbers that are written in place before this step are to be counted."""
        return not self.warned and (self.is_rare(step) or step < _OBSERVED_STEPS)

    def add(self, counted: Counted, written: WriteCounts) -> bool:
        """Add a step's counts; returns whether a warning must say now what such writes lose."""
        if written.in_place and not self.warned_of_second_master:
            recent = [
                each for each in self._blended_steps if each > counted.step - _STEPS_IN_WINDOW
            ]
            # Released steps come one by one.
            self._blended_steps = [*dict.fromkeys([*recent, counted.step])]
            self._rare_blends += counted.rare and written.nearby > 0
        self.warned = (
            written.through_data > 0
            or len(self._blended_steps) >= _BLENDED_STEPS
            or self._rare_blends >= _BLENDED_STEPS
        )
        return self.warned
