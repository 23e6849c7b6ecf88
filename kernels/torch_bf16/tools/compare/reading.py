"""Read the existing runs that a user names, as rows."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from .logs import KINDS, Logged, logged_in
from .training import Run

__all__ = ["runs_of"]

_USUAL = (
    *("train_loss", "loss", "train/loss", "train_loss_step", "train/loss_step", "loss/train"),
    *("training_loss", "train_loss_epoch"),
)


def runs_of(words: Sequence[str], metric: str | None) -> tuple[dict[str, list[Run]], str]:
    """Runs by their row, and the metric that is compared.

    Args:
        words: each is ``PATH`` or ``NAME=PATH``; words with the same name are runs of one row with
            different seeds, and so are several runs in one folder.
        metric: a metric that all runs have; None for the training loss, by its usual names.

    Raises:
        ValueError, OSError, ImportError: something is not a run, or has no such metric.
    """
    pairs = [_split(word) for word in words]
    found: dict[str, list[Logged]] = {}
    for (given, place), name in zip(pairs, _names(pairs), strict=True):
        path, run = _path_of(place)
        logged = in_file = logged_in(path)
        if run is not None:
            logged = [each for each in in_file if each.run == run]
            if not logged:
                known = ", ".join(each.run for each in in_file)
                raise ValueError(f"{path} has no run {run!r}; those in it: {known}")
        for each in logged:
            named = given or run is not None or not each.run
            found.setdefault(name if named else each.run, []).append(each)
    chosen = metric or _metric_of([run for runs in found.values() for run in runs])
    rows = {
        name: [_run(name, seed, each, chosen) for seed, each in enumerate(runs)]
        for name, runs in found.items()
    }
    if len(rows) < 2:
        raise ValueError(
            f"there is one row, {next(iter(rows))!r}, and nothing to compare it with: give two "
            "runs or more, such as fp32=logs/version_0 bf16=logs/version_1. A run is one of "
            f"{KINDS}"
        )
    return rows, chosen


def _names(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """A name for each word: what precedes ``=``, else as much of its path as identifies it."""
    paths = [os.path.normpath(path) for name, path in pairs]
    folders = [
        os.path.dirname(p) if os.path.splitext(p)[1] in (".csv", ".json") else p for p in paths
    ]
    short = [os.path.basename(folder) or path for folder, path in zip(folders, paths, strict=True)]
    taken = Counter(name or each for (name, _), each in zip(pairs, short, strict=True))
    return [
        name or (each if taken[each] == 1 else path)
        for (name, _), each, path in zip(pairs, short, paths, strict=True)
    ]


def _split(word: str) -> tuple[str, str]:
    """The name, empty if there is none, and the path of a word."""
    # A folder may be called lr=0.001.
    if any(os.path.exists(path) for path in (word, word.rpartition(":")[0]) if path):
        return "", word
    name, equals, path = word.partition("=")
    return (name, path) if equals and name and path and os.sep not in name else ("", word)


def _path_of(path: str) -> tuple[Path, str | None]:
    file, colon, run = path.rpartition(":")
    if colon and file.endswith(".db"):
        return Path(file), run
    return Path(path), None


def _metric_of(runs: Sequence[Logged]) -> str:
    shared = set(runs[0].values).intersection(*(run.values for run in runs))
    usual = [name for name in _USUAL if name in shared]
    losses = sorted(name for name in shared if "loss" in name.lower())
    if usual:
        # transformers ends a log of many entries of loss with a single train_loss.
        return max(usual, key=lambda name: min(len(run.values[name]) for run in runs))
    if len(losses) == 1:
        return losses[0]
    if not shared:
        each = "; ".join(f"{run.path}: {_some(run.values)}" for run in runs[:4])
        raise ValueError(f"the runs have no metric in common ({each})")
    raise ValueError(f"which metric? Give --metric: all runs have {_some(sorted(shared))}")


def _run(name: str, seed: int, logged: Logged, metric: str) -> Run:
    if metric not in logged.values:
        raise ValueError(
            f"{logged.path} has no metric {metric!r}; those in it: {_some(logged.values)}"
        )
    values = logged.values[metric]
    steps = sorted(values)
    run = Run(name, seed, steps, [values[step] for step in steps])
    clock = [(step, logged.clock[step]) for step in steps if step in logged.clock]
    run.seconds = [
        (after - before) / (late - early)
        for (early, before), (late, after) in pairwise(clock)
        if after > before
    ]
    return run


def _some(names: Sequence[str] | Mapping[str, object]) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
