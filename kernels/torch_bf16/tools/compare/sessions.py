"""Train all runs of a comparison, one after the other; Ctrl-C takes effect between two steps."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

from torch_bf16.tools.output import number, progress_line

from .progress import Progress
from .rows import Row
from .store import Store
from .training import OngoingRun, Plan, Run

__all__ = ["train_all"]

# Between two saves of a run, so that little is lost with a killed process.
_SAVE_SECONDS = 60.0


class _Interrupts:
    """Delays Ctrl-C until the end of a step; a second one takes effect at once."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    caught = _Interrupts()
    # Other threads may not set handlers; and if Ctrl-C is ignored, it stays so.
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield caught
        return
    before = signal.signal(signal.SIGINT, caught)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)


def train_all(plan: Plan, rows: Sequence[Row], seeds: int, store: Store) -> dict[str, list[Run]]:
    """Train every row with every seed, all rows of a seed before the next; the runs by row.

    Args:
        plan: what all runs share.
        rows: the rows, the reference first.
        seeds: how many seeds.
        store: the folder of runs; runs that are there are not trained again.

    Raises:
        KeyboardInterrupt: after the run in progress was saved or has ended.
        ValueError: the model, its batches or an optimizer cannot be used.
    """
    found: dict[str, list[Run]] = {row.name: [] for row in rows}
    with progress_line() as show, _interrupts() as interrupts:
        progress = Progress(plan.steps * len(rows) * seeds, show)
        for seed in range(seeds):
            for row in rows:
                run = store.load_finished(row, seed)
                if run is None:
                    run = _train(plan, row, seed, store, progress, interrupts)
                    store.save(row, run)
                    if interrupts.came:
                        progress.say(
                            f"stopped after {row.name}, seed {seed}; the same command resumes with "
                            "what is left"
                        )
                        raise KeyboardInterrupt
                else:
                    progress.start(f"{row.name}, seed {seed}", plan.steps, plan.steps)
                found[row.name].append(run)
    return found


def _train(
    plan: Plan, row: Row, seed: int, store: Store, progress: Progress, interrupts: _Interrupts
) -> Run:
    training = OngoingRun(plan, row, seed, store.load_interrupted(row, seed))
    progress.start(f"{row.name}, seed {seed}", plan.steps, training.done)
    saved = time.monotonic()
    for loss in training.steps():
        progress.advance(loss)
        late = time.monotonic() - saved > _SAVE_SECONDS
        if interrupts.came or late:
            kept = store.save_interrupted(row, training)
            saved = time.monotonic()
            if interrupts.came:
                where = f"{row.name}, seed {seed}, step {training.done}"
                progress.say(
                    f"stopped at {where}; the same command resumes "
                    + ("from there" if kept else "from the beginning of this run")
                )
                raise KeyboardInterrupt
    run = training.finish()
    broken = run.broken_at
    last = (
        f"loss {number(run.losses[-1], 5)}" if broken is None else f"NOT A NUMBER at step {broken}"
    )
    progress.finish(f"{len(run.losses)} steps, {last}")
    return run
