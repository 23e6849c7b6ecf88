"""Lets all ranks get the states that the first one has, or refuses to broadcast them.

``set_optimizer_state_dict`` with ``broadcast_from_rank0=True`` sends the other ranks only the
entries that they have already. Of a weight whose exact master was saved in another format, as by
FSDP1 or with another recipe, they would continue from the bf16 number, and rank 0 from the master.
And it sends the memory of each tensor, which the others take for one in row-major order: states of
a weight in channels_last would get there with their numbers in other places.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bf16.errors import StateMismatchError
from torch_bf16.states.views import MASTERS
from torch_bf16.torch_patches import Replacement

__all__ = ["watch_broadcasts"]


def watch_broadcasts() -> None:
    """Look at what torch's modules for distributed state dicts send, once a program has them."""
    for module, function, around in (
        ("torch.distributed.checkpoint.state_dict", "_broadcast_state_dict", _checking),
        ("torch.distributed.fsdp._optim_utils", "_broadcast_state", _in_rows_from_first),
    ):
        if hasattr(sys.modules.get(module), function):
            _replacement(sys.modules[module], function, around).apply()


@functools.cache
def _replacement(module: Any, function: str, around: Any) -> Replacement:
    return Replacement("broadcast_states", module, function, around)


def _in_rows_from_first(original: Any) -> Any:
    def broadcast_state(fsdp_state: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        return original(fsdp_state, _in_rows(state), *args, **kwargs)

    return broadcast_state


def _checking(original: Any) -> Any:
    def broadcast_state_dict(full: Any, local: Any, *args: Any, **kwargs: Any) -> None:
        full = {key: _in_rows(each) for key, each in full.items()}
        owners = {key.rpartition(".")[0] for key in local if _is_master(key)}
        if not owners:
            # So is a broadcast of weights, which ranks without our optimizers may take part in.
            original(full, local, *args, **kwargs)
            return
        masters = [key for key in full if key not in local and _is_master(key)]
        unsent = [[key for key in masters if key.rpartition(".")[0] in owners]]
        dist.broadcast_object_list(unsent, src=0, group=kwargs.get("pg"))
        if unsent[0]:
            name, _, key = unsent[0][0].removeprefix("state.").rpartition(".")
            raise StateMismatchError(
                f"the state dict has {key} of {name!r}, and this optimizer keeps exact masters in "
                "another format: the file was saved by FSDP1, or with another recipe. "
                "broadcast_from_rank0=True sends ranks only entries that they have, so that all "
                "but rank 0 would continue from the bf16 weights. Read the file on every rank, "
                "and pass StateDictOptions(full_state_dict=True) to set_model_state_dict and then "
                "set_optimizer_state_dict. No state was changed"
            )
        original(full, local, *args, **kwargs)

    return broadcast_state_dict


def _in_rows(value: Any) -> Any:
    dense = isinstance(value, Tensor) and value.layout == torch.strided
    return value.contiguous() if dense else value


def _is_master(key: str) -> bool:
    return key.startswith("state.") and key.rpartition(".")[2] in MASTERS
