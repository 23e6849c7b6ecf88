"""All runs of a comparison, one after the other, and an interrupt between two steps."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

from torch_bf16.tools.output import progress_line

from .progress import Progress
from .rows import Row
from .store import Store
from .training import OngoingRun, Plan, Run

__all__ = ["train_all"]

# Between two looks at what a killed process would leave behind.
_SAVE_SECONDS = 60.0


class _Interrupts:
    """Ctrl-C, taken between two steps; a second one is taken at once."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    caught = _Interrupts()
    # Other threads may not, and where Ctrl-C is ignored it stays so.
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield caught
        return
    before = signal.signal(signal.SIGINT, caught)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)


def train_all(plan: Plan, rows: Sequence[Row], seeds: int, store: Store) -> list[Run]:
    """Train every row with every seed, all rows of a seed before the next seed.

    Args:
        plan: what they share.
        rows: the reference first.
        seeds: how many.
        store: what was trained before is taken from there.

    Raises:
        KeyboardInterrupt: after what there is was saved.
        ValueError: a model, batches or optimizers are not as they must be.
    """
    found: dict[tuple[str, int], Run] = {}
    with progress_line(sys.stderr) as show, _interrupts() as interrupts:
        progress = Progress(plan.steps * len(rows) * seeds, show)
        for seed in range(seeds):
            for row in rows:
                run = store.load_finished(row, seed)
                if run is None:
                    run = _train(plan, row, seed, store, progress, interrupts)
                    store.save(row, run)
                else:
                    progress.start(f"{row.name}, seed {seed}", plan.steps, plan.steps)
                found[row.name, seed] = run
    return [found[row.name, seed] for row in rows for seed in range(seeds)]


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
                    f"stopped at {where}; the same command goes on "
                    + ("from there" if kept else "from the beginning of this run")
                )
                raise KeyboardInterrupt
    run = training.finish()
    broken = run.broken_at
    last = f"loss {run.losses[-1]:.4f}" if broken is None else f"NO NUMBER at step {broken}"
    progress.finish(f"{len(run.losses)} steps, {last}")
    return run
