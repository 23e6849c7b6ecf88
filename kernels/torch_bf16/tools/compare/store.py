"""The folder of a comparison: finished runs, and where an interrupted one goes on."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from torch_bf16.tools.machine import versions

from .rows import Row
from .training import OngoingRun, Plan, Run

__all__ = ["Store"]


_OURS = re.compile(r"-seed\d+\.(json|pt|new)$")


class Store:
    """Runs in a folder, each with what it follows from.

    A run that was made from something else is refused, so that a comparison is of one thing.

    Args:
        folder: is made where it is not there.
        plan: what all runs share.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder / "runs"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._plan = plan

    def load_finished(self, row: Row, seed: int) -> Run | None:
        """A run that is there, None where it must be trained.

        Raises:
            ValueError: what is there is of another comparison, or no run.
        """
        path = self._path(row, seed, ".json")
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text())
            origin, run = content["of"], Run(**content["run"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not a run of compare ({type(error).__name__}: {error}); delete it, and "
                "it is trained again"
            ) from error
        self._check(path, origin, row)
        return run

    def save(self, row: Row, run: Run) -> None:
        """Keep a finished run, and forget where it was interrupted."""
        content = {"of": self._origin(row), "run": asdict(run)}
        self._write(self._path(row, run.seed, ".json"), json.dumps(content).encode())
        self._path(row, run.seed, ".pt").unlink(missing_ok=True)

    def load_interrupted(self, row: Row, seed: int) -> dict[str, Any] | None:
        """The state of a run that was interrupted, None where there is none.

        Raises:
            ValueError: the file is of another comparison, or damaged.
        """
        path = self._path(row, seed, ".pt")
        if not path.exists():
            return None
        try:
            content = torch.load(path, map_location=self._plan.device, weights_only=True)
            origin, state = content["of"], content["state"]
        # What torch.load raises for a damaged file is not one class.
        except Exception as error:
            raise ValueError(
                f"{path}, an interrupted run, cannot be read ({type(error).__name__}); delete it, "
                "and the run begins again"
            ) from error
        self._check(path, origin, row)
        return state

    def save_interrupted(self, row: Row, training: OngoingRun) -> bool:
        """Keep where a run stands; False where its optimizer's state cannot be relied on."""
        if not training.resumable:
            return False
        path = self._path(row, training.run.seed, ".pt")
        beside = path.with_suffix(".new")
        torch.save({"of": self._origin(row), "state": training.state()}, beside)
        os.replace(beside, path)
        return True

    def _path(self, row: Row, seed: int, ending: str) -> Path:
        return self.folder / (re.sub(r"[^\w.+-]+", "_", row.name) + f"-seed{seed}{ending}")

    def _origin(self, row: Row) -> dict[str, Any]:
        plan = self._plan
        return {
            "model": plan.subject.source,
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
        other = [
            f"{k} {origin.get(k)!r} and not {v!r}" for k, v in wanted.items() if origin.get(k) != v
        ]
        if other:
            raise ValueError(
                f"{path} was made with {', '.join(other)}. Ask for the same, or give another "
                "--out, or --fresh to begin again"
            )

    def _write(self, path: Path, content: bytes) -> None:
        beside = path.with_suffix(".new")
        beside.write_bytes(content)
        os.replace(beside, path)

    def clear(self) -> None:
        """Forget all runs; what else is in the folder stays."""
        for path in self.folder.iterdir():
            if _OURS.search(path.name):
                path.unlink()
