"""Read existing runs, as other programs' loggers wrote them."""

from __future__ import annotations

import csv
import json
import math
import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from torch_bf16.errors import described

__all__ = ["KINDS", "Logged", "logged_in"]

KINDS = (
    "metrics.csv of Lightning's CSVLogger, trainer_state.json of transformers, TensorBoard's event "
    "files, trackio's .db, or a folder with one of them"
)
_EVENTS = "events.out.tfevents"
_NUMBERED = re.compile(r"(\d+)$")


@dataclass
class Logged:
    """What a logger kept of one run.

    Attributes:
        run: its name in the file; empty if the file holds only one run.
        path: the file.
        values: the values of each metric, by step.
        clock: seconds at each step, if they are known.
    """

    run: str
    path: Path
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    clock: dict[int, float] = field(default_factory=dict)

    def add(self, metric: str, step: int, value: Any) -> None:
        """Add a value, if it is a number; of several at one step, the last one counts."""
        try:
            number = float(value)
        except (TypeError, ValueError):
            return
        self.values.setdefault(metric, {})[step] = number


def logged_in(path: Path) -> list[Logged]:
    """All runs of a file or a folder.

    Raises:
        ValueError, OSError, ImportError: there is no run, or it cannot be read; the message says
            why.
    """
    found = []
    for file in _files(path):
        runs = _reader(file)(file)
        if not runs or not all(run.values for run in runs):
            raise ValueError(f"{file} holds no logged step, so there is no run in it")
        found += runs
    return found


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"there is no {path}. A run is {KINDS}")
    if not path.is_dir():
        return [path]
    if (path / "trainer_state.json").exists():
        return [path / "trainer_state.json"]
    checkpoints = _by_number(path.glob("checkpoint-*/trainer_state.json"))
    patterns = ("metrics.csv", "*/metrics.csv", f"{_EVENTS}*", f"*/{_EVENTS}*", "*.db")
    kinds = [checkpoints[-1:], *(_by_number(path.glob(each)) for each in patterns)]
    files = next((each for each in kinds if each), [])
    if files and _EVENTS in files[0].name:
        # A run that was resumed, or evaluated at its end, has several files in its folder.
        files = [*dict.fromkeys(each.parent for each in files)]
    if not files:
        raise ValueError(f"{path} holds no run. One is {KINDS}")
    return files


def _by_number(paths: Iterable[Path]) -> list[Path]:
    def order(path: Path) -> tuple[int, str]:
        match = _NUMBERED.search(path.parent.name)
        return (int(match[1]) if match else -1), str(path)

    return sorted(paths, key=order)


def _reader(path: Path) -> Callable[[Path], list[Logged]]:
    if path.is_dir() or _EVENTS in path.name:
        return _of_tensorboard
    known = {".csv": _of_csv, ".json": _of_trainer, ".db": _of_trackio}
    if path.suffix not in known:
        raise ValueError(f"{path} is of an unknown kind. A run is {KINDS}")
    return known[path.suffix]


def _of_csv(path: Path) -> list[Logged]:
    try:
        # A program that saved it again may have put a byte order mark before the first name.
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.DictReader(file)
            rows, names = list(lines), lines.fieldnames or []
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from None
    if "step" not in names:
        raise ValueError(
            f"{path} has no column 'step', as Lightning's CSVLogger writes it; its columns: "
            + (", ".join(map(str, names[:8])) or "none")
        )
    found = Logged("", path)
    for number, row in enumerate(rows, start=2):
        step = _step(row["step"], f"{path}, line {number}")
        for name in names:
            if name not in ("step", "epoch") and row[name]:
                found.add(name, step, row[name])
    return [found]


def _of_trainer(path: Path) -> list[Logged]:
    try:
        content = json.loads(path.read_bytes())
        history = content["log_history"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a trainer_state.json of transformers: {described(error)}"
        ) from None
    found = Logged("", path)
    for entry in history if isinstance(history, list) else ():
        if isinstance(entry, Mapping) and "step" in entry:
            step = _step(entry["step"], str(path))
            for name in entry.keys() - {"step", "epoch"}:
                found.add(name, step, entry[name])
    return [found]


def _of_tensorboard(path: Path) -> list[Logged]:
    try:
        from tensorboard.backend.event_processing import (  # pyright: ignore[reportMissingImports]
            event_accumulator,
        )
    except ImportError:
        raise ImportError(
            f"{path} is an event file of TensorBoard; reading it needs its package, which is not "
            "installed here: pip install tensorboard"
        ) from None
    events = event_accumulator.EventAccumulator(
        str(path), size_guidance={"scalars": 0, "tensors": 0}
    )
    events.Reload()
    found = Logged("", path)
    for name in events.Tags()["scalars"]:
        for each in events.Scalars(name):
            found.add(name, each.step, each.value)
            found.clock[each.step] = each.wall_time
    # torch writes scalars as tensors if it is asked for the new style.
    for name in events.Tags()["tensors"]:
        for each in events.Tensors(name):
            if each.tensor_proto.float_val:
                found.add(name, each.step, each.tensor_proto.float_val[0])
                found.clock[each.step] = each.wall_time
    return [found]


def _of_trackio(path: Path) -> list[Logged]:
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            query = "SELECT run_name, step, timestamp, metrics FROM metrics ORDER BY id"
            rows = database.execute(query).fetchall()
        entries = [(name, step, when, json.loads(text)) for name, step, when, text in rows]
    except (sqlite3.Error, ValueError) as error:
        raise ValueError(f"{path} is not a database of trackio: {error}") from None
    found: dict[str, Logged] = {}
    for name, step, when, metrics in entries:
        run = found.setdefault(name, Logged(name, path))
        place = _step(step, str(path))
        if isinstance(metrics, Mapping):
            for metric, value in metrics.items():
                run.add(metric, place, value)
        try:
            run.clock[place] = datetime.fromisoformat(str(when)).timestamp()
        except ValueError:
            continue
    return list(found.values())


def _step(value: Any, where: str) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: {value!r} is not a step")
    return int(number)
