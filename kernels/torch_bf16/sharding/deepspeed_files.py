"""Checkpoints of DeepSpeed: several files, written in place, that must be of one step.

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
    """Have an optimizer's state dict say at which of its engine's steps it was saved.

    One that is loaded is then compared with what the engine has read from its other files, on all
    ranks, which load at the same time.

    Args:
        engine: DeepSpeed's; the optimizer inside gets hooks.
        device: where its ranks reduce numbers.
    """
    # The engine owns the optimizer, and this its hooks.
    known, group = weakref.ref(engine), engine.optimizer.dp_process_group
    optimizer = engine.optimizer.optimizer

    def note(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, _ENTRY: {_STEP: _step_of(known)}}

    def compare(_: Any, state_dict: dict[str, Any]) -> None:
        entry = state_dict.get(_ENTRY)
        saved = entry.get(_STEP) if isinstance(entry, Mapping) else None
        # Another optimizer's, of which nothing is known, has none on any rank.
        found = [-1, -1] if saved is None else [int(saved), _step_of(known)]
        _check_steps(found, device, group)

    optimizer.register_state_dict_post_hook(note)
    optimizer.register_load_state_dict_pre_hook(compare, prepend=True)


def _step_of(engine: weakref.ref[Any]) -> int:
    found: Any = engine()
    return found.global_steps


def _check_steps(found: list[int], device: torch.device, group: Any) -> None:
    """Raise on all ranks where one has read files of different steps, or of another than others."""
    ends = torch.tensor([*found, *(-each for each in found)], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group)
    steps = {*ends[:2].tolist(), *(-ends[2:]).tolist()}
    if len(steps) > 1:
        first, last = min(steps), max(steps)
        since = "an unknown step" if first < 0 else f"step {first}"
        raise CheckpointError(
            f"the files of this checkpoint are of different steps, {since} and step {last}: a run "
            "was saving it over an older one when it ended, and DeepSpeed writes in place. Load an "
            "older checkpoint (tag=..., or another folder), and save each under a tag or into a "
            "folder of its own. The engine has read some of these weights already: make a new one"
        )
