"""Training on several ranks, sharded in every way, ends with the bits of one process."""

import itertools

import pytest
import torch
import torch.distributed as dist
from sharded_models import (
    EVEN,
    STRATEGIES,
    THIRDS,
    UNEVEN,
    WIDE,
    Case,
    held,
    local,
    make_model,
    mesh_of,
    named,
)
from sharded_training import (
    RECIPES,
    STEPS,
    Run,
    assert_same,
    gradient,
    joined,
    recipe_of,
    reference,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import torch_bf16
from torch_bf16.sharding import shard_of

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
    *(Case("fsdp1", (n,)) for n in (1, 2, 4)),
    *(Case("fsdp1", (n,), UNEVEN) for n in (2, 3, 4)),
    Case("fsdp1-grad-op", (3,), UNEVEN),
    Case("fsdp1-hybrid", (2, 2), UNEVEN),
    Case("fsdp1-no-shard", (2,)),
]
WIDE_CASES = [
    *(Case("fsdp2", (n,), WIDE) for n in (2, 3, 4)),
    Case("fsdp2-columns", (2,), WIDE),
    Case("hsdp", (2, 2), WIDE),
    *(Case("tp", (n,), WIDE) for n in (2, 4)),
    Case("fsdp2+tp", (2, 2), WIDE),
]
# A rank would hold pieces of blocks.
SPLIT = [Case("tp", (3,), WIDE), Case("fsdp2-columns", (4,), WIDE)]
# Each trains the first half of the steps, and the next one the others.
WAYS = [("fsdp2", (4,)), ("fsdp2+tp", (2, 2)), ("hsdp", (2, 2)), ("tp", (4,))]
# Around twice, and the recipes in turn.
RESHARDED = [
    (Case(*before, sizes), Case(*after, sizes), recipe)
    for before, after, (recipe, sizes) in zip(
        WAYS * 2,
        (WAYS[1:] + WAYS[:1]) * 2,
        itertools.cycle([(RECIPES[0], EVEN), (RECIPES[1], EVEN), ("bytes", WIDE)]),
        strict=False,
    )
]


def each_once():
    """A case, a recipe, whether the cast comes before sharding, and a backend.

    The cases of a way take the recipes in turn, and the orders: how a tensor is cut says nothing of
    how its numbers are stored, and what is cast last is cast in place, to the same tensors.
    """
    for number, case in enumerate((*CASES, *WIDE_CASES)):
        recipe = RECIPES[number % 2] if case in CASES else "bytes"
        if case.way in STRATEGIES:
            backend = "cpu" if case.sizes == EVEN else "eager"
            yield pytest.param(case, recipe, True, backend, id=case.id(recipe, backend))
        elif case.way == "ddp" or 1 in case.mesh or number // 2 % 2:
            yield pytest.param(case, recipe, True, "eager", id=case.id(recipe, "eager"))
        else:
            yield pytest.param(case, recipe, False, "cpu", id=case.id(recipe, "cpu-cast-last"))


def trained(case, recipe, cast_first, backend):
    return Run(case, recipe, cast_first=cast_first, backend=backend).train().parts()


@pytest.mark.parametrize(("case", "recipe", "cast_first", "backend"), [*each_once()])
def test_weights_and_states_equal_one_process(ranks, case, recipe, cast_first, backend):
    found = ranks(case.world, trained, case, recipe, cast_first, backend)
    assert_same(reference(case.sizes, recipe), joined(found))


def trained_and_saved(case, recipe, folder):
    Run(case, recipe).train(range(STEPS // 2)).save(folder)


def loaded_and_trained(case, recipe, folder):
    return Run(case, recipe).load(folder).train(range(STEPS // 2, STEPS)).parts()


@pytest.mark.parametrize(
    ("before", "after", "recipe"),
    RESHARDED,
    ids=[f"{before.id()}-to-{after.id(recipe)}" for before, after, recipe in RESHARDED],
)
def test_a_checkpoint_continues_sharded_in_another_way(ranks, before, after, recipe, tmp_path):
    ranks(before.world, trained_and_saved, before, recipe, tmp_path)
    found = ranks(after.world, loaded_and_trained, after, recipe, tmp_path)
    assert_same(reference(before.sizes, recipe), joined(found))


def placed_otherwise(case, recipe):
    """Half of the steps; then states in other places, and gradients whole or as sums."""
    rank, world = dist.get_rank(), dist.get_world_size()
    here, other = mesh_of(case), DeviceMesh("cpu", torch.arange(world).view(-1, 1))
    model = None
    if case.way == "tp":
        model = torch_bf16.cast_model(make_model(case.sizes), recipe_of(recipe))
        parallelize_module(model, here, {"norm": SequenceParallel()})
    run, norms = Run(case, recipe, model=model).train(range(STEPS // 2)), []
    states = run.optimizer.state_dict()
    whole = {
        (n, key): each.view(torch.float16 if key == "remainder16" else each.dtype).full_tensor()
        for n, state in states["state"].items()
        for key, each in state.items()
        if isinstance(each, DTensor)
    }
    for (n, key), each in whole.items():
        old, mesh, placements = states["state"][n][key], here, [Replicate()]
        if each.ndim == 2:
            placements, each = [Shard(1)], each.chunk(world, 1)[rank]
        elif each.ndim == 3:
            mesh, placements, each = other, [Shard(0), Replicate()], each.chunk(world)[rank]
        memory = each.contiguous().view(old.dtype)
        states["state"][n][key] = DTensor.from_local(
            memory, mesh, placements, shape=old.shape, stride=old.stride()
        )
    run.optimizer.load_state_dict(states)
    for step in range(STEPS // 2, STEPS):
        run.give(step)
        exact = []
        for name, p in named(run.model).items():
            full = gradient(name, held(case)[name][0], step).to(p.dtype)
            exact.append(full.double().norm())
            # At some steps only what is whole on each rank has another placement.
            if isinstance(p, DTensor) and (step % 3 < 2 or p.placements[0].is_replicate()):
                summed = torch.zeros_like(full)
                summed.view(-1)[rank::world] = full.view(-1)[rank::world]
                memory, placement = (summed, Partial()) if step % 3 else (full, Replicate())
                p.grad = DTensor.from_local(memory, p.device_mesh, [placement])
        norm = torch_bf16.total_norm(run.model.parameters())
        norms.append((norm.item(), torch.stack(exact).norm().item()))
        run.optimizer.step()
    return run.parts(), norms


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", [Case("fsdp2", (2,)), Case("tp", (2,))], ids=Case.id)
def test_gradients_and_states_that_are_placed_otherwise_are_moved(ranks, case, recipe):
    """A norm's gradient is a sum over ranks under sequence parallelism."""
    parts, norms = zip(*ranks(case.world, placed_otherwise, case, recipe), strict=True)
    assert_same(reference(case.sizes, recipe), joined(parts))
    for norm, exact in itertools.chain(*norms):
        assert norm == pytest.approx(exact, rel=1e-6, abs=0)


def clipped(case):
    """After backward passes: at each step the norms found and expected; then what is held."""
    run, norms = Run(case, RECIPES[0]), []
    # Tensor parallelism's ranks see one batch.
    batch = dist.get_rank() // 2 if case.way == "fsdp2+tp" else dist.get_rank()
    for step in range(5):
        torch.manual_seed(100 * step + batch)
        with torch.autocast("cpu", torch.bfloat16):
            loss = run.model(torch.randn(6, case.sizes[0])).float().square().mean()
        loss.backward()
        parameters = [*run.model.parameters()]
        norm = torch_bf16.total_norm(parameters)
        whole = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in parameters]
        exact = torch.stack([each.double().norm() for each in whole]).norm()
        norms.append((norm.item(), exact.item()))
        run.optimizer.scale_next_step((0.5 / norm).clamp(max=1.0))
        run.optimizer.step()
        run.optimizer.zero_grad()
    return norms, run.parts()


@pytest.mark.parametrize(
    "case",
    [Case("ddp", (4,)), Case("hsdp", (2, 2)), Case("fsdp2+tp", (2, 2), (8, 12, 4))],
    ids=Case.id,
)
def test_replicas_stay_identical_through_backward_passes_and_clipping(ranks, case):
    norms, parts = zip(*ranks(case.world, clipped, case), strict=True)
    for each in zip(*norms, strict=True):
        assert len({norm for norm, _ in each}) == 1
        for norm, exact in each:
            assert norm == pytest.approx(exact, rel=1e-6, abs=0)
    joined(parts)


def split_blocks(case, backend):
    run = Run(case, "bytes", backend=backend)
    before = [local(parameter).clone() for parameter in run.model.parameters()]
    with pytest.raises(NotImplementedError, match="blocks of 64 of a row, and a rank would"):
        run.train(range(1))
    assert all(map(torch.equal, before, map(local, run.model.parameters())))
    assert not run.optimizer.state


@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("case", SPLIT, ids=Case.id)
def test_a_cut_through_blocks_is_refused_on_every_rank(ranks, case, backend):
    ranks(case.world, split_blocks, case, backend)


def planes_cut_otherwise():
    """Whole blocks in each piece: 8 and 4 of a row, but torch cuts 12 columns of scales into 6."""
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.zeros(2, 3, 256), mesh, [Shard(1)])
    with pytest.raises(NotImplementedError, match="blocks of 64 of a row, and a rank would"):
        shard_of(nn.Parameter(weight)).check_blocks(64)


def test_a_cut_that_scales_do_not_follow_is_refused_on_every_rank(ranks):
    ranks(2, planes_cut_otherwise)
