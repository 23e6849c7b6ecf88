"""Optimizers without a fused rule over ways to shard: the bits of one process, resumed anywhere.

Run by four processes at once: ``sharded_foreign.py RANK STORE FOLDER``.
"""

from __future__ import annotations

import random
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from flat_training import Case as FlatCase
from flat_training import gathered as flat_gathered
from flat_training import make_model as make_flat_model
from flat_training import mesh_of as flat_mesh_of
from flat_training import train_on_given_gradients as train_flat
from flat_training import wrap
from foreign_cases import OWN, Normed, unknown
from sharded_training import (
    EVEN,
    RECIPES,
    UNEVEN,
    WIDE,
    WORLD,
    Case,
    assert_same,
    make_model,
    mesh_of,
    names_of,
    recipe_of,
    shard,
    train_on_given_gradients,
    whole,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import torch_bf16
from torch_bf16.sharding.dtensor import is_dtensor, local

STEPS = 6


class Trust(torch.optim.Optimizer):
    """Momentum at a rate that follows from the norms of the whole weight and of its update."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    average = state.setdefault("exp_avg", torch.zeros_like(p))
                    average.lerp_(p.grad, 0.1)
                    ratio = p.norm() / average.norm().clamp(min=1e-6)
                    p.add_(average * ratio.clamp(max=10), alpha=-group["lr"])


class Rows(torch.optim.Optimizer):
    """A second moment for each row, a shape of its own."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    rows = p.grad.view(len(p), -1).square().mean(1)
                    mean = state.setdefault("rows", torch.zeros_like(rows)).lerp_(rows, 0.1)
                    shape = (-1,) + (1,) * (p.ndim - 1)
                    p.sub_(group["lr"] * p.grad / (mean.sqrt() + 1e-8).view(shape))


class Draws(torch.optim.SGD):
    """Descent with noise."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


class Tosses(torch.optim.SGD):
    """Descent at times."""

    def step(self, closure=None):
        if random.random() < 0.9:
            super().step()


KINDS = {
    "rprop": OWN["rprop"],
    "amsgrad": unknown(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "adamax": OWN["adamax"],
    "trust": Trust,
    "rows": Rows,
    "normed": Normed,
}
CASES = [
    (Case("fsdp2", (4,), UNEVEN), "rprop", RECIPES[0]),
    (Case("fsdp2", (4,), UNEVEN), "rows", RECIPES[1]),
    (Case("fsdp2", (4,), UNEVEN), "normed", RECIPES[0]),
    (Case("fsdp2-columns", (2,)), "amsgrad", RECIPES[0]),
    (Case("fsdp2-columns", (2,)), "trust", RECIPES[0]),
    (Case("hsdp", (2, 2), UNEVEN), "adamax", RECIPES[1]),
    (Case("hsdp", (2, 2), UNEVEN), "trust", RECIPES[1]),
    (Case("tp", (3,), UNEVEN), "rprop", RECIPES[1]),
    (Case("tp", (3,), UNEVEN), "trust", RECIPES[0]),
    (Case("fsdp2+tp", (2, 2), (6, 10, 6)), "adamax", RECIPES[0]),
    (Case("fsdp2+tp", (2, 2), (6, 10, 6)), "rows", RECIPES[0]),
    (Case("fsdp2", (3,), WIDE), "amsgrad", "bytes"),
    (Case("fsdp2", (3,), WIDE), "trust", "bytes"),
    (Case("ddp", (2,)), "normed", RECIPES[0]),
]
RESUMED = (("amsgrad", RECIPES[0]), ("rows", RECIPES[1]))
# What needs whole matrices.
WHOLE = {"trust", "rows", "normed"}
FLAT = (
    FlatCase("FULL_SHARD", 4, sizes=UNEVEN),
    FlatCase("FULL_SHARD", 3, False, UNEVEN),
)


def optimizer_for(model, kind, recipe):
    optimizer = KINDS[kind](model.parameters())
    torch_bf16.convert(optimizer, recipe, module=model)
    optimizer.bucket_bytes = 5000
    return optimizer


def prepared(case, kind, recipe, mesh=None):
    model = torch_bf16.cast_module(make_model(case.sizes), recipe)
    model = shard(model, case, mesh or mesh_of(case))
    return model, optimizer_for(model, kind, recipe)


def gathered(model, optimizer, group):
    found = {}
    for name, parameter in names_of(model):
        found[name] = whole(parameter, group)
        for key, value in optimizer.state[parameter].items():
            if not isinstance(value, torch.Tensor):
                assert value == STEPS, (name, key)
                continue
            found[f"{name}/{key}"] = whole(value, group)
            if is_dtensor(value):
                assert value.placements == parameter.placements
                assert local(value).untyped_storage().nbytes() == local(value).nbytes
            else:
                # Every number of a tensor like the parameter is where the parameter's is.
                assert not is_dtensor(parameter) or value.shape != parameter.shape
    return found


def reference(sizes, kind, recipe):
    model = torch_bf16.cast_module(make_model(sizes), recipe)
    optimizer = optimizer_for(model, kind, recipe)
    train_on_given_gradients(model, optimizer, range(STEPS))
    return gathered(model, optimizer, None)


def resumed_elsewhere(folder, kind, recipe, expected, group):
    """Half of the steps one way, the others another, through DCP; then whole in one process."""
    for number, (before, after) in enumerate(
        [
            (Case("fsdp2", (4,)), Case("fsdp2+tp", (2, 2))),
            (Case("tp", (4,)), Case("hsdp", (2, 2))),
        ]
    ):
        model, optimizer = prepared(before, kind, recipe)
        train_on_given_gradients(model, optimizer, range(STEPS // 2))
        place = f"{folder}/{kind}-{recipe}-{number}"
        dcp.save(content(model, optimizer), checkpoint_id=place)
        options = StateDictOptions(full_state_dict=True)
        everything = get_state_dict(model, optimizer, options=options)

        model, optimizer = prepared(after, kind, recipe)
        loaded = content(model, optimizer)
        dcp.load(loaded, checkpoint_id=place)
        put(model, optimizer, loaded["model"], loaded["optimizer"])
        train_on_given_gradients(model, optimizer, range(STEPS // 2, STEPS))
        assert_same(expected, gathered(model, optimizer, group), (kind, recipe, before, after))

        # Whole state dicts load into one process, and into shards.
        model = torch_bf16.cast_module(make_model(EVEN), recipe)
        optimizer = optimizer_for(model, kind, recipe)
        put(model, optimizer, *everything)
        train_on_given_gradients(model, optimizer, range(STEPS // 2, STEPS))
        assert_same(expected, gathered(model, optimizer, None), (kind, recipe, "one process"))
        model, optimizer = prepared(after, kind, recipe)
        put(model, optimizer, *everything, options)
        train_on_given_gradients(model, optimizer, range(STEPS // 2, STEPS))
        assert_same(expected, gathered(model, optimizer, group), (kind, recipe, "from whole"))


def content(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def put(model, optimizer, weights, states, options=None):
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options
    )


def flat(kind, recipe, case, mesh, group):
    """What looks at single elements goes through FSDP1, too."""
    mixed = case.original or recipe == RECIPES[1]
    one = make_flat_model(case.sizes, mixed, recipe)
    optimizer = optimizer_for(one, kind, recipe)
    names = dict(one.named_parameters())
    train_on_given_gradients(one, optimizer, range(STEPS))
    expected = {}
    for name, parameter in names.items():
        expected[name] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                expected[f"{name}/{key}"] = value

    for resumed in (False, True):
        model = wrap(make_flat_model(case.sizes, mixed, recipe), case, mesh)
        optimizer = optimizer_for(model, kind, recipe)
        train_flat(optimizer, range(STEPS // 2))
        if resumed:
            states = get_optimizer_state_dict(model, optimizer)
            weights = model.state_dict()
            model = wrap(make_flat_model(case.sizes, mixed, recipe), case, mesh)
            optimizer = optimizer_for(model, kind, recipe)
            model.load_state_dict(weights)
            set_optimizer_state_dict(model, optimizer, states)
        train_flat(optimizer, range(STEPS // 2, STEPS))
        for state in optimizer.state.values():
            assert state.pop("noise_step") == STEPS
        found = flat_gathered(optimizer, group)
        assert_same(expected, found, (case.id, kind, recipe, resumed))


def refusals(group):
    """Nothing is updated, on any rank."""
    for kind, match in (
        (lambda p: Draws(p, lr=0.1), "draws random numbers"),
        (lambda p: Tosses(p, lr=0.1), "draws random numbers"),
    ):
        KINDS["refused"] = kind
        model, optimizer = prepared(Case("fsdp2", (4,)), "refused", RECIPES[0])
        refused(model, optimizer, match)
    case = FLAT[0]
    for kind, match in (("trust", "looks at whole tensors"), ("normed", "couples all parameters")):
        model = wrap(make_flat_model(case.sizes, True, RECIPES[0]), case, flat_mesh_of(case))
        optimizer = optimizer_for(model, kind, RECIPES[0])
        refused(model, optimizer, f"is sharded by FSDP1, and the step of .* {match}")
    print("refused", flush=True)


def refused(model, optimizer, match):
    before = [local(p).detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    state = random.getstate(), torch.get_rng_state()
    with pytest.raises(NotImplementedError, match=match):
        optimizer.step()
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
    assert all(map(torch.equal, before, map(local, model.parameters())))
    assert not optimizer.state


def main(rank, store, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    groups = {n: dist.new_group(list(range(n))) for n in range(1, WORLD + 1)}
    for kind, recipe in RESUMED:
        expected = reference(EVEN, kind, recipe)
        resumed_elsewhere(folder, kind, recipe, expected, groups[WORLD])
        print("resumed", kind, flush=True)
    for case, kind, name in CASES:
        mesh, group = mesh_of(case), groups[torch.Size(case.mesh).numel()]
        if mesh.get_coordinate() is not None:
            recipe = recipe_of(name)
            model, optimizer = prepared(case, kind, recipe, mesh)
            train_on_given_gradients(model, optimizer, range(STEPS))
            on_pieces = {found for (_, ndim, cut), found in optimizer._pieces.items() if ndim > 1}
            if case.way not in ("ddp", "tp"):
                assert on_pieces == {kind not in WHOLE}, (case.id, kind)
            expected = reference(case.sizes, kind, recipe)
            assert_same(expected, gathered(model, optimizer, group), (case.id, kind, name))
            print("same", case.id, kind, flush=True)
    for case in FLAT:
        mesh = flat_mesh_of(case)
        if rank < case.ranks:
            for recipe in RECIPES:
                flat("amsgrad", recipe, case, mesh, groups[case.ranks])
            print("flat", case.id, flush=True)
    dist.barrier()
    refusals(groups[WORLD])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
