"""Checkpoints of sharded exact masters: gathered, broadcast, saved and loaded in other ways.

Run by four processes at once: ``sharded_checkpoints.py RANK STORE FOLDER``.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from sharded_training import WORLD, Case, cast_and_sharded, names_of
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from torch_bf16.sharding import box_of, local

RECIPE = "bf16-fp32-master"

# One matrix with more elements than 16 bits have patterns.
WHOLE = (
    Case("fsdp2", (4,), (256, 262, 3)),
    Case("fsdp2-columns", (4,), (256, 256, 4)),
    Case("fsdp2+tp", (2, 2), (256, 260, 4)),
    Case("tp", (4,), (256, 260, 4)),
)


def pattern(name, shape):
    """Every lower half that there is, NaNs of bf16 included, for tensors that are large enough."""
    first = sum(map(ord, name))
    return torch.arange(first, first + torch.Size(shape).numel()).to(torch.int16).view(shape)


def fill(model, optimizer):
    get_optimizer_state_dict(model, optimizer)
    for name, parameter in names_of(model):
        memory = local(optimizer.state[parameter]["remainder16"])
        memory.copy_(pattern(name, parameter.shape)[box_of(parameter)])


def assert_filled(model, optimizer, context):
    for name, parameter in names_of(model):
        found = local(optimizer.state[parameter]["remainder16"])
        assert found.dtype == torch.int16, (context, name)
        assert torch.equal(found, pattern(name, parameter.shape)[box_of(parameter)]), (
            context,
            name,
        )


def whole_state_dicts(case, rank):
    """Whole state dicts of a sharded model have every bit, and so has what they are loaded into."""
    for flat, offload in ((False, False), (True, False), (False, True)):
        context = (case.id, flat, offload)
        model, optimizer = cast_and_sharded(case, RECIPE)
        fill(model, optimizer)
        options = StateDictOptions(
            full_state_dict=True, cpu_offload=offload, flatten_optimizer_state_dict=flat
        )
        whole = get_optimizer_state_dict(model, optimizer, options=options)
        for name, parameter in names_of(model) if whole else ():
            key = f"state.{name}.remainder16"
            found = whole[key] if flat else whole["state"][name]["remainder16"]
            expected = pattern(name, parameter.shape)
            assert torch.equal(found.view(torch.int16), expected), (*context, name)
        assert whole or (offload and rank)
        for from_first in (True,) if offload else (True, False):
            model, optimizer = cast_and_sharded(case, RECIPE)
            given = whole if rank == 0 or not from_first else {}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
            set_optimizer_state_dict(model, optimizer, given, options=options)
            assert_filled(model, optimizer, (*context, from_first))
    print("whole", case.id, flush=True)


def main(rank, store, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    for case in WHOLE:
        whole_state_dicts(case, rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
