"""Checkpoints that DeepSpeed had not finished when its run was killed: what each rank finds out."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed_cases import LIKE_MATRICES, state_digest
from deepspeed_conversions import converted
from deepspeed_refusals import message
from deepspeed_training import config, digest, engine_of, train, weights

OLD, NEW = 3, 5

# What lies there after a kill: of the model and of each rank's optimizer the old file, the new one,
# half of it, or none. ZeRO-3 has a file of the model for each rank.
UNFINISHED: dict[str, tuple[int, dict[str, str]]] = {
    "model new": (1, {"mp_rank_00_model": "new"}),
    "rank 1 old": (1, {"mp_rank_00_model": "new", "pp_rank_0_": "new"}),
    "rank 1 new": (2, {"pp_rank_1_": "new"}),
    "model cut": (1, {"mp_rank_00_model": "cut"}),
    "optimizers cut": (2, {"mp_rank_00_model": "new", "pp_rank_0_": "cut", "pp_rank_1_": "cut"}),
    "optimizers gone": (1, {"mp_rank_00_model": "new", "pp_rank_0_": "gone", "pp_rank_1_": "gone"}),
    "rank 0 new": (3, {"pp_rank_0_": "new"}),
    "models new": (3, {"model_states": "new"}),
    "finished": (3, {"states.pt": "new"}),
}


def die(*arguments: Any, **named: Any) -> None:
    """In place of ``torch.save``: the process is killed before it writes anything."""
    os.kill(os.getpid(), signal.SIGKILL)


def _die_within(save: Any) -> Any:
    """Likewise, when half of the file has been written."""

    def write_half(state_dict: Any, path: Any, **named: Any) -> None:
        save(state_dict, path, **named)
        os.truncate(path, os.path.getsize(path) // 2)
        die()

    return write_half


def killed(folder: Path) -> None:
    """Two ranks, of which one dies while it writes the second checkpoint."""
    engine = engine_of(config(2))
    train(engine, range(OLD))
    engine.save_checkpoint(str(folder), tag="old")
    train(engine, range(OLD, NEW))
    if dist.get_rank() == 1:
        torch.save = _die_within(torch.save)
    engine.save_checkpoint(str(folder), tag="new")


def after_kill(folder: Path) -> dict[str, Any]:
    """Weights and states of a run that was not killed, and of one that goes on after it."""
    found = {}
    for name, first in (("whole", 0), ("resumed", OLD)):
        engine = engine_of(config(2))
        if first:
            engine.load_checkpoint(str(folder), tag="old")
        train(engine, range(first, NEW))
        found[name] = digest(weights(engine)), state_digest(engine)
    return found


def unfinished(folder: Path) -> dict[str, str]:
    """What is said of each, on every rank."""
    for stage in {stage for stage, _ in UNFINISHED.values()}:
        engine = engine_of(config(stage))
        for age, steps in (("old", range(OLD)), ("new", range(OLD, NEW))):
            train(engine, steps)
            engine.save_checkpoint(str(folder / str(stage) / age), tag="tag")
    found = {}
    for name, (stage, changed) in UNFINISHED.items():
        mixed = folder / name
        if dist.get_rank() == 0:
            _mix(folder / str(stage), mixed, changed)
        dist.barrier()
        engine = engine_of(config(stage))
        found[name] = message(lambda: engine.load_checkpoint(str(mixed)), Exception)  # noqa: B023
    return found


def _mix(saved: Path, mixed: Path, changed: dict[str, str]) -> None:
    shutil.copytree(saved / "old", mixed)
    for part, how in changed.items():
        for new in (saved / "new" / "tag").glob(f"*{part}*"):
            target = mixed / "tag" / new.name
            target.unlink() if how == "gone" else shutil.copy(new, target)
            if how == "cut":
                os.truncate(target, target.stat().st_size // 2)


def checkpoints(folder: Path) -> dict[str, Any]:
    """All of this, and what DeepSpeed's tools make of whole ones."""
    kept = {
        f"ZeRO-{stage}": converted(stage, LIKE_MATRICES, folder / f"converted{stage}")
        for stage in (1, 3)
    }
    return {"after kill": after_kill(folder), "unfinished": unfinished(folder), "converted": kept}
