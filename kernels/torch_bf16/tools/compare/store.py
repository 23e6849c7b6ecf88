"""The folder of a comparison: finished runs, and the states that interrupted runs resume from."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from torch_bf16.backends.file_lock import locked
from torch_bf16.checkpoints.atomic_write import replacing
from torch_bf16.errors import described
from torch_bf16.tools.machine import versions
from torch_bf16.tools.output import write_json

from .rows import Row
from .training import OngoingRun, Plan, Run

__all__ = ["Store", "file_stem"]

_KINDS = (".json", ".pt")
_NAMED = re.compile(r"-seed\d+(\.json|\.pt)$")


def file_stem(row: Row) -> str:
    """What the names of a row's files begin with."""
    return re.sub(r"[^\w.+-]+", "_", row.name)


class Store:
    """Runs in a folder, each with its origin: the model, settings and versions that made it.

    A run of another origin is refused, so that a comparison does not mix unlike runs. As a context
    manager it keeps other processes out of the folder.

    Args:
        folder: the folder of the comparison; created if it does not exist.
        plan: what all runs share.

    Raises:
        OSError: the folder cannot be created.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder / "runs"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._plan = plan
        # Once, before any run: later the model's own code may import more.
        self._model = plan.subject.source
        self._held = ExitStack()

    def __enter__(self) -> Store:
        """Take the folder.

        Raises:
            ValueError: another process has it.
        """
        path = self.folder.parent / ".lock"
        file = self._held.enter_context(locked(path))
        if file is not None:
            file.truncate(0)
            file.write(f"{os.getpid()}".encode())
            file.flush()
            self._held.callback(file.truncate, 0)
        # Without a lock and without a name in it, the file system has no locks.
        elif path.exists() and (holder := path.read_text()):
            raise ValueError(
                f"another compare, process {holder}, is training in {self.folder.parent}: wait for "
                "it, or give another --out FOLDER"
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def load_finished(self, row: Row, seed: int) -> Run | None:
        """A finished run; None if it must be trained.

        Raises:
            ValueError: the file belongs to another comparison, or is not a run.
        """
        path = self._path(row, seed, ".json")
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text())
            origin, run = content["of"], Run(**content["run"])
            run.losses, run.survived = tree_map(_nan_of_null, (run.losses, run.survived))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not a run of compare ({described(error)}); delete it to train it again"
            ) from error
        self._check(path, origin, row)
        return run

    def save(self, row: Row, run: Run) -> None:
        """Save a finished run, and delete the state of its interruption."""
        content = {"of": self._origin(row), "run": asdict(run)}
        write_json(content, self._path(row, run.seed, ".json"))
        self._path(row, run.seed, ".pt").unlink(missing_ok=True)

    def load_interrupted(self, row: Row, seed: int) -> dict[str, Any] | None:
        """The state of an interrupted run; None if there is none.

        Raises:
            ValueError: the file belongs to another comparison, or is damaged.
        """
        path = self._path(row, seed, ".pt")
        if not path.exists():
            return None
        try:
            content = torch.load(path, map_location=self._plan.device, weights_only=True)
            origin, state = content["of"], content["state"]
        # torch.load raises exceptions of many classes for a damaged file.
        except Exception as error:
            raise ValueError(
                f"{path}, an interrupted run, cannot be read ({type(error).__name__}); delete it "
                "to begin the run again"
            ) from error
        self._check(path, origin, row)
        return state

    def save_interrupted(self, row: Row, training: OngoingRun) -> bool:
        """Save the state of an unfinished run; False if its optimizer's state cannot be trusted."""
        if not training.resumable:
            return False
        with replacing(self._path(row, training.run.seed, ".pt")) as new:
            torch.save({"of": self._origin(row), "state": training.state()}, new)
        return True

    def _path(self, row: Row, seed: int, ending: str) -> Path:
        return self.folder / f"{file_stem(row)}-seed{seed}{ending}"

    def _origin(self, row: Row) -> dict[str, Any]:
        plan = self._plan
        return {
            "model": self._model,
            "row": f"{row.name}: {row.description}",
            "optimizer": "" if row.own else plan.optimizer.text,
            "lr": plan.lr,
            "steps": plan.steps,
            "schedule": plan.schedule,
            "device": str(plan.device),
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "torch_bf16": versions()["torch-bf16"],
        }

    def _check(self, path: Path, origin: Mapping[str, Any], row: Row) -> None:
        wanted = self._origin(row)
        differences = [
            f"{k} {origin.get(k)!r} and not {v!r}" for k, v in wanted.items() if origin.get(k) != v
        ]
        if differences:
            raise ValueError(
                f"{path} was made with {', '.join(differences)}. Ask for the same, or give another "
                "--out, or --fresh to begin again"
            )

    def clear(self, rows: Sequence[Row], seeds: int) -> None:
        """Delete all runs, and what would stand in their way; other files in the folder stay.

        Args:
            rows: the rows that will be trained.
            seeds: with how many seeds.
        """
        own = {self._path(r, n, kind) for r in rows for n in range(seeds) for kind in _KINDS}
        for path in {*own, *self.folder.iterdir()}:
            if path in own or (_NAMED.search(path.name) and _is_run(path)):
                path.unlink(missing_ok=True)
                # What a process that was killed while it wrote may have left.
                path.with_name(f".{path.name}.partial").unlink(missing_ok=True)


def _is_run(path: Path) -> bool:
    """Whether a file is a run of compare, finished or interrupted."""
    try:
        if path.suffix == ".json":
            content: Any = json.loads(path.read_text())
        else:
            content = torch.load(path, map_location="meta", weights_only=True)
    # torch.load raises exceptions of many classes.
    except Exception:
        return False
    return isinstance(content, dict) and "of" in content and bool({"run", "state"} & {*content})


def _nan_of_null(value: Any) -> Any:
    return math.nan if value is None else value
