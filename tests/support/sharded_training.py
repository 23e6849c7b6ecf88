"""A small model under every way to shard it, and its training on given or real gradients.

Run by four processes at once: ``sharded_training.py RANK STORE FOLDER``. Meshes of fewer ranks
leave the others out.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import torch_bf16
from torch_bf16 import Recipe
from torch_bf16.sharding.dtensor import box_of, is_dtensor, local, place_like

WORLD = 4
STEPS = 20
RECIPES = ("true-bf16-stochastic", "bf16-fp32-master")
# Bytes that blocks of a row share scales of, and rows of whole blocks.
BYTES = Recipe("bytes", weights="bf16+8", exp_avg="int8", exp_avg_sq="int8")
EVEN, UNEVEN, WIDE = (8, 24, 4), (5, 7, 3), (128, 256, 66)
THIRDS = (6, 12, 9)


@dataclass(frozen=True)
class Case:
    """A way to shard, on the first ranks of the world."""

    way: str
    mesh: tuple[int, ...]
    sizes: tuple[int, int, int] = EVEN

    @property
    def id(self):
        kind = {EVEN: "", THIRDS: "", WIDE: "-wide"}.get(self.sizes, "-uneven")
        return f"{self.way}-{'x'.join(map(str, self.mesh))}{kind}"

    @property
    def recipes(self):
        """Names of what is tried."""
        return ("bytes",) if self.sizes == WIDE else RECIPES


CASES = [
    *(Case("ddp", (n,)) for n in (1, 2, 3, 4)),
    *(Case("fsdp2", (n,)) for n in (1, 2, 4)),
    Case("fsdp2", (3,), THIRDS),
    *(Case("fsdp2", (n,), UNEVEN) for n in (1, 2, 3, 4)),
    Case("fsdp2-columns", (2,)),
    Case("hsdp", (2, 2)),
    Case("hsdp", (2, 2), UNEVEN),
    *(Case("tp", (n,)) for n in (1, 2, 4)),
    Case("tp", (3,), THIRDS),
    Case("tp", (3,), UNEVEN),
    *(Case("fsdp2+tp", mesh) for mesh in ((2, 1), (1, 2), (2, 2))),
    *(Case("fsdp2+tp", mesh, THIRDS) for mesh in ((3, 1), (1, 3))),
    Case("fsdp2+tp", (2, 2), (6, 10, 6)),
    *(Case("fsdp2", (n,), WIDE) for n in (2, 3, 4)),
    Case("fsdp2-columns", (2,), WIDE),
    Case("hsdp", (2, 2), WIDE),
    *(Case("tp", (n,), WIDE) for n in (2, 4)),
    Case("fsdp2+tp", (2, 2), WIDE),
]
# A rank would hold pieces of blocks.
SPLIT = [Case("tp", (3,), WIDE), Case("fsdp2-columns", (4,), WIDE)]


class Model(nn.Module):
    """Matrices, a convolution's kernel, biases, a norm gain and a number."""

    def __init__(self, sizes):
        super().__init__()
        inner, wide, outer = sizes
        self.up = nn.Linear(inner, wide)
        self.norm = nn.LayerNorm(wide)
        self.down = nn.Linear(wide, outer)
        self.kernel = nn.Parameter(torch.randn(wide, 2, 3))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        hidden = torch.tanh(self.up(x)) * self.kernel.sum((1, 2))
        return self.down(self.norm(hidden)) * self.scale


def make_model(sizes):
    torch.manual_seed(3)
    return Model(sizes)


def gradient(name, shape, step):
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    return (torch.randn(shape, generator=generator) / 8).to(torch.bfloat16)


def shard(model, case, mesh):
    """The model sharded in place, or wrapped."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case.way == "ddp":
        model = DistributedDataParallel(model, process_group=mesh.get_group())
        torch_bf16.sync_masters(model, group=mesh.get_group())
        return model
    if case.way in ("tp", "fsdp2+tp"):
        tp = mesh["tp"] if case.way == "fsdp2+tp" else mesh
        # What is not in the plan stays whole, and so do the activations between the two.
        up = ColwiseParallel(output_layouts=Replicate())
        down = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(model, tp, {"up": up, "down": down})
        if case.way == "tp":
            return model
        mesh = mesh["dp"]
    options = {}
    if case.way == "fsdp2-columns":
        options["shard_placement_fn"] = lambda p: Shard(1) if p.ndim == 2 else None
    return fully_shard(model, mesh=mesh, mp_policy=policy, **options)


def mesh_of(case):
    ranks = torch.arange(torch.Size(case.mesh).numel()).view(case.mesh)
    names = {"fsdp2+tp": ("dp", "tp"), "hsdp": ("replica", "shard")}.get(case.way, ("ranks",))
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def names_of(model):
    return [(name.removeprefix("module."), p) for name, p in model.named_parameters()]


def whole(tensor, group):
    """The whole tensor from the boxes that the ranks of a group hold."""
    if not is_dtensor(tensor):
        return tensor.detach().clone()
    held = [None] * dist.get_world_size(group)
    part = local(tensor).detach()
    dist.all_gather_object(held, (box_of(tensor), part), group=group)
    result = torch.zeros(tensor.shape, dtype=part.dtype)
    for box, piece in held:
        if piece.numel():
            result[box] = piece
    return result


def gathered(model, optimizer, group):
    found = {}
    for name, parameter in names_of(model):
        found[name] = whole(parameter, group)
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = whole(value, group)
            assert is_dtensor(value) == (is_dtensor(parameter) and key != "step")
            # No rank keeps memory of more than its own part.
            assert local(value).untyped_storage().nbytes() == local(value).nbytes
            if is_dtensor(value):
                shape = parameter.shape
                if key.endswith("_scale"):
                    shape = torch.Size((shape[0], shape[1:].numel() // 64))
                assert (value.placements, value.shape) == (parameter.placements, shape)
    return found


def assert_same(expected, found, context):
    assert expected.keys() == found.keys(), (context, expected.keys() ^ found.keys())
    for name, want in expected.items():
        got = found[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), (context, name)
        raw = {1: torch.int8, 2: torch.int16, 4: torch.int32}[want.itemsize]
        assert torch.equal(got.view(raw), want.view(raw)), (context, name, got, want)


def train_on_given_gradients(model, optimizer, steps=range(STEPS)):
    for step in steps:
        for name, parameter in names_of(model):
            given = gradient(name, parameter.shape, step).to(parameter.dtype)
            held = given[box_of(parameter)].clone()
            parameter.grad = place_like(parameter, held)
        optimizer.step()


def recipe_of(name):
    return BYTES if name == "bytes" else torch_bf16.get_recipe(name)


def optimizer_for(model, recipe, backend="eager"):
    optimizer = torch_bf16.AdamW(
        names_of(model), lr=0.01, weight_decay=0.1, recipe=recipe_of(recipe)
    )
    optimizer.backend = backend
    return optimizer


def reference(sizes, recipe):
    """What one process makes of the same gradients."""
    model = torch_bf16.cast_module(make_model(sizes), recipe_of(recipe))
    optimizer = optimizer_for(model, recipe)
    train_on_given_gradients(model, optimizer)
    return gathered(model, optimizer, None)


def given_gradients(case, recipe, expected, mesh, group):
    """Weights and states equal those of one process, whether cast before sharding or after."""
    for cast_first in (True, False) if case.way != "ddp" and 1 not in case.mesh else (True,):
        model = make_model(case.sizes)
        if cast_first:
            torch_bf16.cast_module(model, recipe_of(recipe))
        model = shard(model, case, mesh)
        identities = [id(p) for p in model.parameters()]
        if not cast_first:
            torch_bf16.cast_module(model, recipe_of(recipe))
        assert identities == [id(p) for p in model.parameters()]
        optimizer = optimizer_for(model, recipe, "eager" if cast_first else "cpu")
        train_on_given_gradients(model, optimizer)
        assert_same(expected, gathered(model, optimizer, group), (case.id, recipe, cast_first))


def resharded_resumes(folder, expected, group):
    """Ten steps one way and ten another, with a distributed checkpoint between them."""
    for recipe, sizes in ((RECIPES[0], EVEN), (RECIPES[1], EVEN), ("bytes", WIDE)):
        ways = [
            Case(way, mesh, sizes)
            for way, mesh in (("fsdp2", (4,)), ("fsdp2+tp", (2, 2)), ("hsdp", (2, 2)), ("tp", (4,)))
        ]
        for number, (before, after) in enumerate(zip(ways, ways[1:] + ways[:1], strict=True)):
            model, optimizer = cast_and_sharded(before, recipe)
            train_on_given_gradients(model, optimizer, range(STEPS // 2))
            place = f"{folder}/{recipe}-{number}"
            saved = get_state_dict(model, optimizer)
            dcp.save(dict(zip(("model", "optimizer"), saved, strict=True)), checkpoint_id=place)

            model, optimizer = cast_and_sharded(after, recipe)
            weights, states = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optimizer": states}, checkpoint_id=place)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
            train_on_given_gradients(model, optimizer, range(STEPS // 2, STEPS))
            context = (before.id, after.id, recipe)
            assert_same(expected[sizes, recipe], gathered(model, optimizer, group), context)


def cast_and_sharded(case, recipe):
    model = shard(
        torch_bf16.cast_module(make_model(case.sizes), recipe_of(recipe)), case, mesh_of(case)
    )
    return model, optimizer_for(model, recipe)


def split_blocks(case):
    """Refused on every rank, those with whole blocks too, and nothing is updated."""
    model, optimizer = cast_and_sharded(case, "bytes")
    before = [local(parameter).detach().clone() for parameter in model.parameters()]
    for backend in ("eager", "cpu"):
        optimizer.backend = backend
        with pytest.raises(NotImplementedError, match="blocks of 64 of a row, and a rank would"):
            train_on_given_gradients(model, optimizer, range(1))
    assert all(map(torch.equal, before, map(local, model.parameters())))
    assert not optimizer.state


def averages(case):
    """Refused on every rank."""
    model, _ = cast_and_sharded(case, RECIPES[0])
    with pytest.raises(NotImplementedError, match="an average of sharded parameters"):
        torch_bf16.EMA(model)
    ema = torch_bf16.EMA(make_model(case.sizes))
    with pytest.raises(NotImplementedError, match="Nothing was averaged"):
        ema.update_parameters(model)
    assert not ema.n_averaged


def real_gradients(group):
    """Replicas stay bit-identical through backward passes and clipping; the norm is the whole's."""
    for case in (Case("ddp", (4,)), Case("hsdp", (2, 2)), Case("fsdp2+tp", (2, 2), (8, 12, 4))):
        model, optimizer = cast_and_sharded(case, RECIPES[0])
        mesh, rank = mesh_of(case), dist.get_rank()
        # Tensor parallelism's ranks see one batch.
        batch = rank // 2 if case.way == "fsdp2+tp" else rank
        for step in range(5):
            torch.manual_seed(100 * step + batch)
            inputs = torch.randn(6, case.sizes[0])
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(inputs).float().square().mean()
            loss.backward()
            norm = torch_bf16.total_norm(model.parameters())
            parts = [whole(p.grad, group).double() for p in model.parameters()]
            exact = torch.stack([part.norm() for part in parts]).norm()
            torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0.0)
            assert len(set(everywhere(norm.item(), group))) == 1
            optimizer.scale_next_step((0.5 / norm).clamp(max=1.0))
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in names_of(model):
            tensors = [parameter, *optimizer.state[parameter].values()]
            bits = [local(t).detach().reshape(-1).view(torch.uint8).tolist() for t in tensors]
            replicas = everywhere((box_of(parameter), bits), group)
            for box, other in replicas:
                assert box != box_of(parameter) or other == bits, (case.id, name)
        print("replicas", case.id, mesh.shape, flush=True)


def everywhere(value, group):
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def main(rank, store, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    groups = {n: dist.new_group(list(range(n))) for n in range(1, WORLD + 1)}
    references = {
        (sizes, recipe): reference(sizes, recipe)
        for sizes, recipe in {(case.sizes, recipe) for case in CASES for recipe in case.recipes}
    }
    real_gradients(groups[WORLD])
    resharded_resumes(folder, references, groups[WORLD])
    print("resumed", flush=True)
    for case in CASES:
        mesh, group = mesh_of(case), groups[torch.Size(case.mesh).numel()]
        if mesh.get_coordinate() is None:
            continue
        for recipe in case.recipes:
            given_gradients(case, recipe, references[case.sizes, recipe], mesh, group)
            print("same", case.id, recipe, flush=True)
    for case in (Case("fsdp2", (4,)), Case("tp", (4,))):
        averages(case)
    print("no averages", flush=True)
    for case in SPLIT:
        if mesh_of(case).get_coordinate() is not None:
            split_blocks(case)
            print("refused", case.id, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
