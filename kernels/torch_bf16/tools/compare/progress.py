"""How far a comparison is: bars on a terminal, a line for each run elsewhere."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

__all__ = ["Progress", "shown_progress"]

_SPARSE = 0.1


class Progress:
    """Tells how runs go: a line for each that has ended.

    Args:
        total: steps of all runs.
        stream: where to.
    """

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total, self._stream = total, stream
        self._done = self._taken = 0
        self._begun = time.monotonic()

    def start(self, run: str, steps: int, done: int) -> None:
        """A run begins.

        Args:
            run: its name.
            steps: that it has.
            done: those that were taken before.
        """
        self._run, self._steps, self._step = run, steps, done
        self._run_begun = time.monotonic()
        self._done += done

    def advance(self, loss: float) -> None:
        """A step was taken."""
        self._step += 1
        self._done += 1
        self._taken += 1

    def finish(self, outcome: str) -> None:
        """The run has ended."""
        self._done += self._steps - self._step
        seconds = time.monotonic() - self._run_begun
        self.say(f"{self._run}: {outcome} in {seconds:.0f} s, {self._left()} left")

    def say(self, line: str) -> None:
        """Print a line that stays."""
        print(line, file=self._stream, flush=True)

    def _left(self) -> str:
        spent = time.monotonic() - self._begun
        left = (self._total - self._done) * spent / max(self._taken, 1)
        return f"{left:.0f} s" if left < 90 else f"{left / 60:.0f} min"


class _OneLine(Progress):
    """With the step that is taken, on a terminal without rich."""

    _shown = 0.0

    def advance(self, loss: float) -> None:
        super().advance(loss)
        now = time.monotonic()
        if now - self._shown > _SPARSE:
            self._shown = now
            step = f"step {self._step} of {self._steps}, loss {loss:.4f}, {self._left()} left"
            line = f"\r\x1b[K{self._run}: {step}"
            print(line, end="", file=self._stream, flush=True)

    def say(self, line: str) -> None:
        print(f"\r\x1b[K{line}", file=self._stream, flush=True)


class _Bars(Progress):
    """By rich: a bar for all runs, and one for the run that goes on."""

    def __init__(self, total: int, stream: TextIO, bars: Any) -> None:
        super().__init__(total, stream)
        self._bars = bars
        self._all = bars.add_task("all runs", total=total, loss="")
        self._one = bars.add_task("", total=1, loss="")

    def start(self, run: str, steps: int, done: int) -> None:
        super().start(run, steps, done)
        self._bars.reset(self._one, description=run, total=steps, completed=done, loss="")
        self._bars.update(self._all, completed=self._done)

    def advance(self, loss: float) -> None:
        super().advance(loss)
        self._bars.update(self._one, completed=self._step, loss=f"loss {loss:.4f}")
        self._bars.update(self._all, completed=self._done)

    def say(self, line: str) -> None:
        self._bars.console.print(line, highlight=False, markup=False)


@contextmanager
def shown_progress(total: int) -> Iterator[Progress]:
    """What shows progress on stderr: a terminal, where rich draws if it is installed, or a pipe.

    Args:
        total: steps of all runs.
    """
    stream = sys.stderr
    if not stream.isatty():
        yield Progress(total, stream)
        return
    if importlib.util.find_spec("rich"):
        from rich import progress
        from rich.console import Console

        columns = (
            progress.TextColumn("{task.description}"),
            *(progress.BarColumn(), progress.MofNCompleteColumn()),
            *(progress.TimeRemainingColumn(), progress.TextColumn("{task.fields[loss]}")),
        )
        with progress.Progress(*columns, console=Console(file=stream)) as bars:
            yield _Bars(total, stream, bars)
        return
    try:
        yield _OneLine(total, stream)
    finally:
        print("\r\x1b[K", end="", file=stream, flush=True)
