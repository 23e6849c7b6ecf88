"""The progress of a comparison: a line for each run and, on a terminal, one for its step."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch_bf16.tools.output import number, say

__all__ = ["Progress"]

# Seconds between two steps that are shown.
_INTERVAL = 0.1


class Progress:
    """Reports how far the runs of a comparison are.

    Args:
        total: the steps of all runs together.
        show: shows a line until the next one, if there is a terminal.
    """

    def __init__(self, total: int, show: Callable[[str], None]) -> None:
        self._total, self._show = total, show
        self._done = self._taken = 0
        self._begun = time.monotonic()
        self._shown = 0.0

    def start(self, run: str, steps: int, done: int) -> None:
        """Note that a run begins.

        Args:
            run: the run's name.
            steps: how many steps it has.
            done: how many of them were taken before.
        """
        self._run, self._steps, self._step = run, steps, done
        self._run_begun = time.monotonic()
        self._done += done

    def advance(self, loss: float) -> None:
        """Note that a step was taken."""
        self._step += 1
        self._done += 1
        self._taken += 1
        now = time.monotonic()
        if now - self._shown > _INTERVAL:
            self._shown = now
            step = f"step {self._step} of {self._steps}, loss {number(loss, 5)}"
            self._show(f"{self._run}: {step}, {self._left()} left")

    def finish(self, outcome: str) -> None:
        """Note that the run has ended."""
        self._done += self._steps - self._step
        seconds = time.monotonic() - self._run_begun
        self.say(f"{self._run}: {outcome} in {seconds:.0f} s, {self._left()} left")

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._show("")
        say(line)

    def _left(self) -> str:
        spent = time.monotonic() - self._begun
        left = (self._total - self._done) * spent / max(self._taken, 1)
        return f"{left:.0f} s" if left < 90 else f"{left / 60:.0f} min"
