"""The folder of a comparison: finished runs, and the states that interrupted runs resume from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from torch_bf16.checkpoints.atomic_write import replacing
from torch_bf16.errors import described
from torch_bf16.tools.machine import versions
from torch_bf16.tools.output import write_text

from .rows import Row
from .training import OngoingRun, Plan, Run

__all__ = ["Store"]


_OURS = re.compile(r"-seed\d+\.(json|pt)(\.partial)?$")


class Store:
    """Runs in a folder, each with its origin: the model, settings and versions that made it.

    A run of another origin is refused, so that a comparison does not mix unlike runs.

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
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not a run of compare ({described(error)}); delete it to train it again"
            ) from error
        self._check(path, origin, row)
        return run

    def save(self, row: Row, run: Run) -> None:
        """Save a finished run, and delete the state of its interruption."""
        content = {"of": self._origin(row), "run": asdict(run)}
        write_text(self._path(row, run.seed, ".json"), json.dumps(content))
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
        return self.folder / (re.sub(r"[^\w.+-]+", "_", row.name) + f"-seed{seed}{ending}")

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

    def clear(self) -> None:
        """Delete all runs; other files in the folder stay."""
        for path in self.folder.iterdir():
            if _OURS.search(path.name):
                path.unlink()
