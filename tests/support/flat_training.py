"""A small model under every way of FSDP1, and its training on given or real gradients.

Run by four processes at once: ``flat_training.py RANK STORE FOLDER``. Ways with fewer ranks leave
the others out.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_training import RECIPES, STEPS, assert_same, everywhere, gradient, optimizer_for
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import torch_bf16
from torch_bf16.checkpoints.export import export_file
from torch_bf16.numerics.rounding import join16
from torch_bf16.sharding.fsdp1 import spans_of

WORLD = 4
EVEN, UNEVEN = (8, 24, 4), (5, 7, 3)


@dataclass(frozen=True)
class Case:
    """A strategy on the first ranks of the world; ``original`` is ``use_orig_params``."""

    way: str
    ranks: int
    original: bool = True
    sizes: tuple[int, int, int] = EVEN

    @property
    def id(self):
        kind = "original" if self.original else "flat"
        return f"{self.way}-{self.ranks}-{kind}{'' if self.sizes == EVEN else '-uneven'}"


CASES = [
    *(Case("FULL_SHARD", n) for n in (1, 2, 4)),
    *(Case("FULL_SHARD", n, sizes=UNEVEN) for n in (2, 3, 4)),
    *(Case("FULL_SHARD", n, False, UNEVEN) for n in (1, 3, 4)),
    Case("SHARD_GRAD_OP", 3, sizes=UNEVEN),
    Case("SHARD_GRAD_OP", 2, False),
    Case("HYBRID_SHARD", 4, sizes=UNEVEN),
    Case("HYBRID_SHARD", 4, False),
    Case("NO_SHARD", 2),
    Case("NO_SHARD", 2, False),
]


class Model(nn.Module):
    """Matrices, a convolution's kernel and a norm gain; with ``mixed``, biases and a number, too.

    Without them no unit of FSDP1 holds tensors of both kinds, if the norm is a unit of its own.
    """

    def __init__(self, sizes, mixed):
        super().__init__()
        inner, wide, outer = sizes
        self.up = nn.Linear(inner, wide, bias=mixed)
        self.norm = nn.LayerNorm(wide)
        self.down = nn.Linear(wide, outer, bias=mixed)
        self.kernel = nn.Parameter(torch.randn(wide, 2, 3))
        self.scale = nn.Parameter(torch.ones(1)) if mixed else 1.0

    def forward(self, x):
        hidden = torch.tanh(self.up(x)) * self.kernel.sum((1, 2))
        return self.down(self.norm(hidden)) * self.scale


def make_model(sizes, mixed, recipe):
    torch.manual_seed(3)
    return torch_bf16.cast_module(Model(sizes, mixed), recipe)


def mixed_in(case, recipe):
    """Whether the model of a case has units that hold matrices beside vectors."""
    return case.original or recipe == "bf16-fp32-master"


def mesh_of(case):
    shape = (2, 2) if case.way == "HYBRID_SHARD" else (case.ranks,)
    names = ("replicas", "shards")[-len(shape) :]
    return DeviceMesh("cpu", torch.arange(case.ranks).view(shape), mesh_dim_names=names)


def wrap(model, case, mesh):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NO_SHARD is deprecated
        return FSDP(
            model,
            device_mesh=mesh,
            sharding_strategy=getattr(ShardingStrategy, case.way),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear, nn.LayerNorm}),
            mixed_precision=MixedPrecision(reduce_dtype=torch.float32),
            device_id=torch.device("cpu"),
            use_orig_params=case.original,
        )


def prepared(case, recipe, mesh, backend="eager"):
    model = wrap(make_model(case.sizes, mixed_in(case, recipe), recipe), case, mesh)
    return model, optimizer_for(model, recipe, backend)


def parts(optimizer):
    """Each parameter with its spans."""
    (group,) = optimizer.param_groups
    return [
        (parameter, spans_of(parameter, optimizer._name(0, n)))
        for n, parameter in enumerate(group["params"])
    ]


def train_on_given_gradients(optimizer, steps=range(STEPS)):
    for step in steps:
        for parameter, spans in parts(optimizer):
            parameter.grad = None
            if not parameter.numel():
                continue
            held = torch.zeros(parameter.numel(), dtype=parameter.dtype)
            for span in spans:
                whole = gradient(span.name, span.shape, step).reshape(-1)
                held[span.start : span.start + span.numel] = whole[span.offset :][: span.numel]
            parameter.grad = held.view(parameter.shape)
        optimizer.step()


def gathered(optimizer, group):
    """Whole weights and states by name, from the spans that the ranks hold."""
    mine = []
    for parameter, spans in parts(optimizer):
        tensors = {"": parameter.detach(), **optimizer.state.get(parameter, {})}
        for span in spans:
            for key, tensor in tensors.items():
                held = tensor
                if key != "step":
                    held = tensor.reshape(-1)[span.start : span.start + span.numel]
                mine.append((span, key, held.clone()))
    found = {}
    for span, key, held in (each for its in everywhere(mine, group) for each in its):
        name = f"{span.name}/{key}" if key else span.name
        shape = () if key == "step" else span.shape
        if span.numel:
            whole = found.setdefault(name, torch.zeros(shape, dtype=held.dtype))
            whole.view(-1)[span.offset :][: held.numel()] = held.view(-1)
    return found


def reference(sizes, mixed, recipe):
    """What one process makes of the same gradients."""
    model = make_model(sizes, mixed, recipe)
    optimizer = optimizer_for(model, recipe)
    train_on_given_gradients(optimizer)
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach()
        found |= {f"{name}/{key}": each for key, each in optimizer.state[parameter].items()}
    return found


def given_gradients(case, recipe, expected, mesh, group):
    backend = "cpu" if case.sizes == EVEN else "eager"
    _, optimizer = prepared(case, recipe, mesh, backend)
    train_on_given_gradients(optimizer)
    assert_same(expected, gathered(optimizer, group), (case.id, recipe, backend))


def resumes(folder, references, groups):
    """Ten steps one way and ten another, on as many ranks, with a distributed checkpoint."""
    ways = [
        Case("FULL_SHARD", 4),
        Case("FULL_SHARD", 3),
        Case("SHARD_GRAD_OP", 2, False),
        Case("HYBRID_SHARD", 4),
        Case("FULL_SHARD", 1),
    ]
    meshes = [mesh_of(case) for case in ways]
    for recipe in RECIPES:
        for number, way in enumerate(ways):
            case = replace(way, original=way.original or recipe != "bf16-fp32-master")
            if dist.get_rank() < case.ranks:
                group = groups[case.ranks]
                before = f"{folder}/{recipe}-{number - 1}" if number else None
                after = f"{folder}/{recipe}-{number}"
                model, optimizer = prepared(case, recipe, meshes[number])
                first = STEPS // len(ways) * number
                parts = ("model", "optimizer")
                if before:
                    saved = dict(zip(parts, get_state_dict(model, optimizer), strict=True))
                    dcp.load(saved, checkpoint_id=before, process_group=group)
                    weights, states = (saved[part] for part in parts)
                    set_state_dict(
                        model, optimizer, model_state_dict=weights, optim_state_dict=states
                    )
                train_on_given_gradients(optimizer, range(first, first + STEPS // len(ways)))
                saved = dict(zip(parts, get_state_dict(model, optimizer), strict=True))
                dcp.save(saved, checkpoint_id=after, process_group=group)
                found = gathered(optimizer, group)
            dist.barrier()
        if dist.get_rank() < ways[-1].ranks:
            assert_same(references[EVEN, True, recipe], found, recipe)


def real_gradients(group):
    """Clipped training on real batches: the norm is the whole's, and replicas stay identical."""
    rank = dist.get_rank()
    for case in (Case("FULL_SHARD", 4), Case("HYBRID_SHARD", 4), Case("NO_SHARD", 4)):
        model = wrap(make_model(case.sizes, True, RECIPES[0]), case, mesh_of(case))
        # Nothing names the module: how FSDP1 laid out the parameters is found all the same.
        optimizer = torch_bf16.AdamW(model.parameters(), lr=0.01, recipe=RECIPES[0])
        monitor = torch_bf16.UpdateMonitor(optimizer, every=1)
        for step in range(4):
            torch.manual_seed(100 * step + rank)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(6, case.sizes[0])).float().square().mean()
            loss.backward()
            norm = torch_bf16.clip_grad_norm_(optimizer, 0.05)
            mine = [
                (span, p.grad.detach().reshape(-1)[span.start : span.start + span.numel])
                for p, spans in parts(optimizer)
                for span in spans
                if p.grad is not None
            ]
            held = {(s.name, s.offset): g for its in everywhere(mine, group) for s, g in its}
            exact = torch.cat([g.double() for g in held.values()]).norm()
            torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0.0)
            assert len(set(everywhere(norm.item(), group))) == 1
            optimizer.step()
            assert monitor.gradient_norm == norm.item()
            optimizer.zero_grad()
        bits = {
            (span.name, span.offset, span.numel, key): tensor.reshape(-1).view(torch.uint8).tolist()
            for p, spans in parts(optimizer)
            for span in spans
            for key, tensor in {"": p.detach(), **optimizer.state.get(p, {})}.items()
        }
        for other in everywhere(bits, group):
            assert all(bits.get(place, held) == held for place, held in other.items()), case.id
        print("clipped", case.id, flush=True)


def names_by_module():
    """The bits are the same however the optimizer came by names: given, or from the module."""
    found = []
    for original in (True, False):
        for converted in (True, False):
            case = Case("FULL_SHARD", 4, original)
            model = wrap(make_model(EVEN, True, RECIPES[1]), case, mesh_of(case))
            if converted:
                plain = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
                optimizer = torch_bf16.convert(plain, RECIPES[1], module=model, backend="eager")
            else:
                optimizer = optimizer_for(model, RECIPES[1])
            train_on_given_gradients(optimizer, range(3))
            found.append(gathered(optimizer, dist.group.WORLD))
    for other in found[1:]:
        assert_same(found[0], other, "names")
    print("named", flush=True)


def masters_of_rank_0():
    """Where rank 0's weights are made everybody's, so are its masters."""
    for original in (True, False):
        case = Case("HYBRID_SHARD", 4, original)
        torch.manual_seed(3 + dist.get_rank())
        model = torch_bf16.cast_module(Model(EVEN, True), RECIPES[1])
        for parameter in model.parameters():
            # What sync_module_states=True does, which torch refuses on CPUs.
            dist.broadcast(parameter.detach(), 0)
        model = wrap(model, case, mesh_of(case))
        torch_bf16.sync_masters(model)
        optimizer = optimizer_for(model, RECIPES[1])
        torch.manual_seed(3)
        fp32 = dict(Model(EVEN, True).named_parameters())
        for parameter, spans in parts(optimizer):
            exact = optimizer.exact_weight(parameter)
            for span in spans:
                held = fp32[span.name].detach().reshape(-1)[span.offset :][: span.numel]
                assert torch.equal(exact[span.start : span.start + span.numel], held), span
    print("synced", flush=True)


def whole_file(folder):
    """A file of gathered state dicts exports the exact weights."""
    case = Case("FULL_SHARD", 4)
    model, optimizer = prepared(case, RECIPES[0], mesh_of(case))
    train_on_given_gradients(optimizer, range(3))
    expected = gathered(optimizer, dist.group.WORLD)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        weights, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": states}, f"{folder}/whole.pt")
        export_file(f"{folder}/whole.pt", f"{folder}/fp32.pt")
        for name, weight in torch.load(f"{folder}/fp32.pt", weights_only=True).items():
            exact = expected[name].float()
            if weight.ndim < 2:
                exact = join16(expected[name], expected[f"{name}/remainder16"])
            assert torch.equal(weight, exact), name
    dist.barrier()
    print("exported", flush=True)


def refusals():
    """What cannot be right says so before anything is updated, and what works instead."""
    stochastic = RECIPES[0]
    flat = Case("FULL_SHARD", 4, False)
    model = wrap(make_model(EVEN, True, stochastic), flat, mesh_of(flat))
    with pytest.raises(NotImplementedError, match="use_orig_params=True"):
        torch_bf16.AdamW(model.parameters(), recipe=stochastic)
    case = Case("FULL_SHARD", 4)
    model, optimizer = prepared(case, stochastic, mesh_of(case))
    weights = list(model.parameters())
    blocks = torch_bf16.get_recipe(stochastic, exp_avg="int8")
    blocked = wrap(make_model((8, 64, 64), True, stochastic), case, mesh_of(case))
    sums = torch_bf16.get_recipe(stochastic, accumulate="bf16_stochastic")
    for match, call in (
        ("cuts tensors anywhere", lambda: torch_bf16.AdamW(blocked.parameters(), recipe=blocks)),
        ("FSDP1 sums them itself", lambda: torch_bf16.AdamW(weights, recipe=sums)),
        ("FSDP1 reduces them", lambda: torch_bf16.release_gradients(model, optimizer)),
        ("cannot be copied", lambda: torch_bf16.EMA(model)),
        ("in pieces on all ranks", lambda: torch_bf16.fp32_state_dict(model, optimizer)),
    ):
        with pytest.raises(NotImplementedError, match=match):
            call()
    whole = torch_bf16.Adafactor(model.parameters(), recipe=stochastic)
    before = [parameter.detach().clone() for parameter in weights]
    for parameter in weights:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(NotImplementedError, match="is sharded"):
        whole.step()
    assert all(map(torch.equal, before, weights))
    fp32 = wrap(Model(EVEN, True), case, mesh_of(case))
    with pytest.raises(ValueError, match="Cast first, then wrap it"):
        torch_bf16.cast_module(fp32, stochastic)
    print("refused", flush=True)


def main(rank, store, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    groups = {n: dist.new_group(list(range(n))) for n in range(1, WORLD + 1)}
    references = {
        (sizes, mixed, recipe): reference(sizes, mixed, recipe)
        for sizes in (EVEN, UNEVEN)
        for mixed in (True, False)
        for recipe in RECIPES
    }
    for case in CASES:
        mesh = mesh_of(case)
        if rank >= case.ranks:
            continue
        for recipe in RECIPES:
            expected = references[case.sizes, mixed_in(case, recipe), recipe]
            given_gradients(case, recipe, expected, mesh, groups[case.ranks])
            print("same", case.id, recipe, flush=True)
    dist.barrier()
    refusals()
    real_gradients(groups[WORLD])
    names_by_module()
    masters_of_rank_0()
    whole_file(folder)
    resumes(folder, references, groups)
    print("resumed", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
