"""Checkpoints of DeepSpeed: several files, written in place, that must be from the same step.

Its engine writes the weights, and each rank a file with its part of the optimizer. A run that is
killed while it saves over an older checkpoint leaves new files beside old ones, and DeepSpeed would
load them together.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from torch_bf16.errors import CheckpointError

__all__ = ["watch_files"]

_ENTRY, _STEP = "deepspeed", "global_steps"


def watch_files(engine: Any, device: torch.device) -> None:
    """Record the engine's step in the optimizer's state dict, and check it when one is loaded.

    It is compared with the step that the engine has read from its other files, on all ranks, which
    load at the same time.

    Args:
        engine: DeepSpeed's engine; the optimizer inside gets hooks.
        device: where its ranks reduce numbers.
    """
    # Weak, because the engine owns the optimizer, which owns the hooks.
    known, group = weakref.ref(engine), engine.optimizer.dp_process_group
    optimizer = engine.optimizer.optimizer

    def note(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, _ENTRY: {_STEP: _step_of(known)}}

    def compare(_: Any, state_dict: dict[str, Any]) -> None:
        entry = state_dict.get(_ENTRY)
        saved = entry.get(_STEP) if isinstance(entry, Mapping) else None
        # A state dict of another optimizer has no entry, on any rank.
        steps = [-1, -1] if saved is None else [int(saved), _step_of(known)]
        _check_steps(steps, device, group)

    optimizer.register_state_dict_post_hook(note)
    optimizer.register_load_state_dict_pre_hook(compare, prepend=True)


def _step_of(engine: weakref.ref[Any]) -> int:
    alive: Any = engine()
    return alive.global_steps


def _check_steps(steps: list[int], device: torch.device, group: Any) -> None:
    """Raise on all ranks if the steps differ, within a rank or between ranks."""
    ends = torch.tensor([*steps, *(-each for each in steps)], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group)
    distinct = {*ends[:2].tolist(), *(-ends[2:]).tolist()}
    if len(distinct) > 1:
        first, last = min(distinct), max(distinct)
        since = "an unknown step" if first < 0 else f"step {first}"
        raise CheckpointError(
            f"the files of this checkpoint are of different steps, {since} and step {last}: a run "
            "was saving it over an older one when it ended, and DeepSpeed writes in place. Load an "
            "older checkpoint (tag=..., or another folder), and save each under a tag or into a "
            "folder of its own. The engine has read some of these weights already: make a new one"
        )
