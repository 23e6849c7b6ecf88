"""Time steps of many optimizers, one after the other within every round."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch

from torch_bf16.errors import first_line
from torch_bf16.tools.redirection import quiet
from torch_bf16.tools.system_memory import available_bytes

from .clock import Clock, clock_for
from .entries import Entry
from .grouping import groups_that_fit
from .models import Shapes
from .running import Copy, Running
from .time_limit import time_limit

__all__ = ["Measured", "Result", "measure"]

_UNTIMED_ROUNDS = 2
# The system and the copy need memory, too.
_SPARE_BYTES = {"cpu": 1 << 30, "cuda": 4 << 30}
_COPY_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}


@dataclass
class Result:
    """What was measured of one entry.

    Attributes:
        entry: the entry that was measured.
        seconds: seconds per step, ``[rounds]``.
        ratios: to the baseline's seconds in the same round, or to their median if the two did not
            fit into memory together, ``[rounds]``.
        host_seconds: seconds until the call of a step returned, ``[rounds]``.
        seconds_after_product: seconds per step right after a matrix product, ``[rounds]``, or
            ``[0]`` if there was no product.
        ratios_after_product: these to the baseline's, as in ``ratios``.
        first_step: seconds of the very first step, with compiling.
        held: bytes of weights, gradients and states.
        moved: bytes that a step must read and write.
        peak: most bytes during a step; None on a CPU, where another process measures it.
        interleaved: whether the baseline ran in the same rounds.
        launches: kernels, copies and fills of one step; None if they cannot be counted.
    """

    entry: Entry
    seconds: np.ndarray
    ratios: np.ndarray
    host_seconds: np.ndarray
    seconds_after_product: np.ndarray
    ratios_after_product: np.ndarray
    first_step: float
    held: int
    moved: int
    peak: int | None
    interleaved: bool
    launches: dict[str, int] | None = None


@dataclass
class Measured:
    """What was measured in a whole run.

    Attributes:
        results: in the order of the entries, without those that failed.
        failures: why entries failed, by their names.
        copy_rates: bytes per second, read and written, of a copy of one large tensor.
        groups: names of the entries that were in memory together.
        interrupted: whether Ctrl-C ended the run; what was measured before counts.
        ours: names of the entries of this package, with those that failed.
    """

    results: list[Result] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    copy_rates: list[float] = field(default_factory=list)
    groups: list[list[str]] = field(default_factory=list)
    interrupted: bool = False
    ours: list[str] = field(default_factory=list)


def measure(
    entries: Sequence[Entry],
    shapes: Shapes,
    device: torch.device,
    rounds: int,
    progress: Callable[[str], None] = lambda line: None,
    available: int | None = None,
    first_seconds: float = 600,
    most: int | None = None,
) -> Measured:
    """Time steps of each entry, one after the other within every round.

    All entries are in memory at once if they fit, so that whatever else the machine does affects
    them alike. If they do not fit, they run in groups, each with the baseline in it; an entry that
    does not even fit beside the baseline runs alone, and its ratio is to the baseline's median.

    An entry that fails is left out, with its error; the others go on. Ctrl-C ends the run after the
    last complete round.

    Args:
        entries: the baseline first.
        shapes: the shapes of the parameters.
        device: the device that they are on.
        rounds: timed rounds, after three steps and two rounds that are not timed.
        progress: called with lines of text about the progress.
        available: bytes of memory to use; None for what the system says is free.
        first_seconds: an entry that takes longer to be made and to take its first three steps,
            because it compiles, counts as failed.
        most: entries in memory at once: the fewer, the closer in time each is to the baseline.

    Raises:
        MemoryError: the baseline does not fit.
        ValueError: the baseline failed, before or in the first rounds.
        KeyboardInterrupt: Ctrl-C came before the first round was complete.
    """
    clock = clock_for(device)
    if available is None and (free := available_bytes(device)) is not None:
        available = max(0, free - _SPARE_BYTES[device.type])
    baseline = entries[0]
    measured = Measured(ours=[each.name for each in entries if each.is_ours])
    waiting = groups_that_fit(entries, shapes, device, available, most, measured.failures)
    finished: dict[str, Result] = {}

    def fail(entry: Entry, why: str) -> None:
        measured.failures[entry.name] = why
        # Its times are those of the first group.
        if entry is baseline and baseline.name not in finished:
            raise ValueError(f"the baseline {baseline.name!r} failed: {why}")

    while waiting:
        group = waiting.pop(0)
        if waiting or measured.groups:
            progress("in memory together: " + ", ".join(each.name for each in group))
        try:
            running = _start(group, shapes, clock, first_seconds, fail, waiting, progress)
            copy = Copy(_COPY_BYTES[device.type], clock)
            measured.interrupted = not _rounds(running, copy, clock, rounds, fail)
        except KeyboardInterrupt:
            if not finished:
                raise
            measured.interrupted = True
            break
        for each in running:
            each.close()
        measured.copy_rates += copy.rates
        measured.groups.append([each.entry.name for each in running])
        del copy
        gc.collect()
        clock.release()
        beside = next((each for each in running if each.entry is baseline), None)
        if beside is not None:
            references = [np.array(beside.seconds), np.array(beside.seconds_after_product)]
        else:
            found = finished[baseline.name]
            references = [found.seconds, found.seconds_after_product]
            references = [
                np.median(each, keepdims=True) if len(each) else each for each in references
            ]
        for each in running:
            # The baseline is in several groups; its figures are those of the first group.
            result = _result(each, references, beside is not None)
            finished.setdefault(each.entry.name, result)
        if measured.interrupted:
            break
    measured.results = [finished[each.name] for each in entries if each.name in finished]
    if measured.interrupted:
        progress("interrupted: what was measured so far is kept")
        for each in entries:
            if each.name not in finished:
                measured.failures.setdefault(each.name, "the run was interrupted before its turn")
    elif clock.counts_launches:
        # Last, because a profiler that has run may leave launches slower.
        progress("counting launches, which Ctrl-C ends")
        with suppress(KeyboardInterrupt):
            for result in measured.results:
                result.launches = _launches(result.entry, shapes, clock, first_seconds)
    return measured


def _start(
    group: Sequence[Entry],
    shapes: Shapes,
    clock: Clock,
    first_seconds: float,
    fail: Callable[[Entry, str], None],
    waiting: list[list[Entry]],
    progress: Callable[[str], None],
) -> list[Running]:
    running = []
    for each in group:
        error = None
        try:
            with quiet(), time_limit(first_seconds):
                running.append(Running(each, shapes, clock))
        # Whatever a library raises is its failure. Only the text is kept: errors hold tensors.
        except Exception as raised:
            error = _one_line(raised)
            out_of_memory = isinstance(raised, torch.OutOfMemoryError)
        if error is None:
            progress(f"{each.name}: first step {running[-1].first_step:.2f} s")
            continue
        gc.collect()
        clock.release()
        if out_of_memory and len(group) > 1 and each is not group[0]:
            progress(f"{each.name}: no memory beside the others; will be tried with fewer")
            waiting.append([group[0], each] if len(group) > 2 else [each])
        else:
            progress(f"{each.name}: {error}")
            fail(each, error)
    return running


def _rounds(
    running: list[Running],
    copy: Copy,
    clock: Clock,
    rounds: int,
    fail: Callable[[Entry, str], None],
) -> bool:
    """Take all rounds; False if Ctrl-C ended them and only complete ones were kept."""
    gc.collect()
    gc.disable()
    complete = 0
    try:
        with quiet():
            for number in range(-_UNTIMED_ROUNDS, rounds):
                if not running:
                    break
                copy.run(clock, number >= 0)
                # Another entry goes first in every round, when caches are full of the copy.
                first = number % len(running)
                for each in running[first:] + running[:first]:
                    try:
                        each.run(clock, number >= 0)
                    except Exception as raised:
                        each.close()
                        running.remove(each)
                        fail(each.entry, _one_line(raised))
                complete += number >= 0
        return True
    except KeyboardInterrupt:
        if not complete:
            raise
        for each in (copy, *running):
            each.keep(complete)
        return False
    finally:
        gc.enable()


def _launches(
    entry: Entry, shapes: Shapes, clock: Clock, first_seconds: float
) -> dict[str, int] | None:
    """Launches of one step of an optimizer made for this; None if they cannot be counted."""
    # A profiler that does not work here must not cost the measured times.
    with suppress(Exception), quiet(), time_limit(first_seconds):
        running = Running(entry, shapes, clock)
        try:
            return running.count_launches(clock)
        finally:
            running.close()
            gc.collect()
            clock.release()


def _result(each: Running, references: Sequence[np.ndarray], interleaved: bool) -> Result:
    seconds, after_product = np.array(each.seconds), np.array(each.seconds_after_product)
    return Result(
        entry=each.entry,
        seconds=seconds,
        ratios=seconds / references[0],
        host_seconds=np.array(each.host_seconds),
        seconds_after_product=after_product,
        ratios_after_product=after_product / references[1],
        first_step=each.first_step,
        held=each.held,
        moved=each.moved,
        peak=each.peak,
        interleaved=interleaved,
    )


def _one_line(error: Exception) -> str:
    line, name = first_line(error), type(error).__name__
    return name if line == name else f"{name}: {line}"
