"""Checkpoints of sharded exact masters: gathered, broadcast, saved and loaded in other ways.

Run by four processes at once: ``sharded_checkpoints.py RANK STORE FOLDER``.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_training import (
    EVEN,
    RECIPES,
    WORLD,
    Case,
    assert_same,
    cast_and_sharded,
    gathered,
    make_model,
    mesh_of,
    names_of,
    optimizer_for,
    reference,
    shard,
    train_on_given_gradients,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import torch_bf16
from torch_bf16.sharding.dtensor import box_of, local

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


class Held(dcp.FileSystemWriter):
    """Writes nothing before it is told to."""

    def __init__(self, folder):
        super().__init__(folder)
        self.go = threading.Event()

    def write_data(self, plan, planner):
        assert self.go.wait(60)
        return super().write_data(plan, planner)


def content_of(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def load_from(place, model, optimizer):
    content = content_of(model, optimizer)
    dcp.load(content, checkpoint_id=place)
    set_state_dict(
        model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"]
    )


def saved_while_training(folder, expected, groups):
    """An asynchronous save has the bits of the moment of the call, whatever is trained since."""
    for recipe in RECIPES:
        model, optimizer = cast_and_sharded(Case("fsdp2", (4,)), recipe)
        train_on_given_gradients(model, optimizer, range(10))
        then = gathered(model, optimizer, groups[WORLD])
        writer = Held(f"{folder}/async-{recipe}")
        saving = dcp.async_save(
            content_of(model, optimizer), storage_writer=writer, process_group=dist.new_group()
        )
        train_on_given_gradients(model, optimizer, range(10, 20))
        writer.go.set()
        saving.result(60)
        assert_same(expected[recipe], gathered(model, optimizer, groups[WORLD]), "went on")

        model, optimizer = cast_and_sharded(Case("tp", (4,)), recipe)
        load_from(f"{folder}/async-{recipe}", model, optimizer)
        assert_same(then, gathered(model, optimizer, groups[WORLD]), "as it was then")
        train_on_given_gradients(model, optimizer, range(10, 20))
        assert_same(expected[recipe], gathered(model, optimizer, groups[WORLD]), "resumed")
    print("asynchronous", flush=True)


def around(folder, rank, expected, groups):
    """Two ranks, DDP, tensor parallelism, one process and FSDP2 train four steps each."""
    for recipe in RECIPES:
        if rank < 2:
            model, optimizer = cast_and_sharded(Case("fsdp2", (2,)), recipe)
            train_on_given_gradients(model, optimizer, range(4))
            place = f"{folder}/around-{recipe}-two"
            content = content_of(model, optimizer)
            dcp.save(content, checkpoint_id=place, process_group=groups[2])
        else:
            mesh_of(Case("fsdp2", (2,)))  # making groups takes all ranks
        dist.barrier()
        place = f"{folder}/around-{recipe}-two"
        for number, case in enumerate((Case("ddp", (4,)), Case("tp", (4,)))):
            model, optimizer = cast_and_sharded(case, recipe)
            load_from(place, model, optimizer)
            train_on_given_gradients(model, optimizer, range(4 * number + 4, 4 * number + 8))
            place = f"{folder}/around-{recipe}-{number}"
            dcp.save(content_of(model, optimizer), checkpoint_id=place)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_state_dict(model, optimizer, options=options)
        if rank == 0:
            model = torch_bf16.cast_module(make_model(EVEN), recipe)
            optimizer = optimizer_for(model, recipe)
            weights, states = whole
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
            train_on_given_gradients(model, optimizer, range(12, 16))
            whole = get_state_dict(model, optimizer)
        sharded, its = cast_and_sharded(Case("fsdp2", (4,)), recipe)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        # In two calls: given nothing of the model, set_state_dict does not wait for rank 0's.
        set_model_state_dict(sharded, whole[0], options=options)
        set_optimizer_state_dict(sharded, its, whole[1], options=options)
        train_on_given_gradients(sharded, its, range(16, 20))
        assert_same(expected[recipe], gathered(sharded, its, groups[WORLD]), ("around", recipe))
    print("around", flush=True)


def built_on_meta(folder, expected, groups):
    """A model that never had weights of its own loads those of a file, and its masters."""
    recipe, case = "bf16-fp32-master", Case("fsdp2", (4,))
    with torch.device("meta"):
        model = make_model(EVEN)
    model = shard(torch_bf16.cast_module(model, recipe), case, mesh_of(case))
    optimizer = optimizer_for(model.to_empty(device="cpu"), recipe)
    load_from(f"{folder}/async-{recipe}", model, optimizer)
    train_on_given_gradients(model, optimizer, range(10, 20))
    assert_same(expected[recipe], gathered(model, optimizer, groups[WORLD]), "meta")
    print("meta", flush=True)


def main(rank, store, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    groups = {n: dist.new_group(list(range(n))) for n in (2, WORLD)}
    expected = {recipe: reference(EVEN, recipe) for recipe in RECIPES}
    saved_while_training(folder, expected, groups)
    built_on_meta(folder, expected, groups)
    around(folder, rank, expected, groups)
    for case in WHOLE:
        whole_state_dicts(case, rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
