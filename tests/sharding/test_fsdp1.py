"""What is peculiar to FSDP1; that it trains is among the cases of test_sharded_training.py."""

import pytest
import torch
import torch.distributed as dist
from exported import export_file
from sharded_models import EVEN, Case, Model, held, make_model, named, shard
from sharded_training import RECIPES, STEPS, Part, Run, adamw, assert_same, joined, reference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import torch_bf16
from torch_bf16.numerics.rounding import join16

CASE = Case("fsdp1", (4,))
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def unnamed(model, recipe):
    return torch_bf16.AdamW(model.parameters(), lr=0.01, recipe=recipe)


def clipped(case):
    """After backward passes: at each step the norm and the gradients; then what is held."""
    # Nothing names the module: how FSDP1 laid out the parameters is found all the same.
    run, steps = Run(case, RECIPES[0], unnamed), []
    monitor = torch_bf16.UpdateMonitor(run.optimizer, every=1)
    for step in range(4):
        torch.manual_seed(100 * step + dist.get_rank())
        with torch.autocast("cpu", torch.bfloat16):
            loss = run.model(torch.randn(6, case.sizes[0])).float().square().mean()
        loss.backward()
        norm = torch_bf16.clip_next_step(run.optimizer, 0.05)
        gradients = {
            name: Part(*held(case)[name], p.grad.detach().reshape(-1).clone())
            for name, p in named(run.model).items()
            if p.grad is not None
        }
        steps.append((norm.item(), gradients))
        run.optimizer.step()
        assert monitor.gradient_norm == norm.item()
        run.optimizer.zero_grad()
    return steps, run.parts()


@pytest.mark.parametrize(
    "case",
    [CASE, Case("fsdp1-hybrid", (2, 2)), Case("fsdp1-no-shard", (4,))],
    ids=Case.id,
)
def test_the_norm_is_the_whole_ones_and_replicas_stay_identical(ranks, case):
    steps, parts = zip(*ranks(case.world, clipped, case), strict=True)
    for step in zip(*steps, strict=True):
        norms, gradients = zip(*step, strict=True)
        exact = torch.cat([g.double().view(-1) for g in joined(gradients).values()]).norm()
        assert len(set(norms)) == 1
        assert norms[0] == pytest.approx(exact.item(), rel=1e-6, abs=0)
    joined(parts)


def converted(model, recipe):
    plain = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return torch_bf16.convert(plain, recipe, model=model, backend="eager")


def trained(make):
    return Run(CASE, RECIPES[1], make).train(range(3)).parts()


@pytest.mark.parametrize("make", [adamw, converted])
def test_names_come_from_the_parameters_or_from_the_module(ranks, make):
    assert_same(reference(EVEN, RECIPES[1], steps=3), joined(ranks(4, trained, make)))


def synced():
    """Where rank 0's weights are made everybody's, so are its masters."""
    torch.manual_seed(3 + dist.get_rank())
    model = torch_bf16.cast_model(Model(EVEN), RECIPES[1])
    for parameter in model.parameters():
        # What sync_module_states=True does, which torch refuses on CPUs.
        dist.broadcast(parameter.detach(), 0)
    case = Case("fsdp1-hybrid", (2, 2))
    run = Run(case, RECIPES[1], model=model)
    torch_bf16.sync_masters(run.model)
    fp32 = dict(make_model(EVEN).named_parameters())
    for name, parameter in named(run.model).items():
        expected = fp32[name].detach().view(-1)[held(case)[name][1]]
        assert torch.equal(run.optimizer.exact_weight(parameter).view(-1), expected), name


def test_masters_of_weights_that_were_made_equal_are_rank_0s(ranks):
    ranks(4, synced)


def read_gathered():
    run = Run(CASE, RECIPES[1]).train(range(1))
    with (
        FSDP.summon_full_params(run.model),
        pytest.raises(ValueError, match="read and write exact weights, outside of summon_full"),
    ):
        torch_bf16.exact_weights(run.model, run.optimizer).__enter__()
    with torch_bf16.exact_weights(run.model, run.optimizer) as weights:
        assert all(each.dtype == torch.float32 for each in weights.values())


def test_exact_weights_of_gathered_parameters_are_refused(ranks):
    ranks(4, read_gathered)


def saved_whole(file, recipe=RECIPES[0], factor=None):
    run = Run(CASE, recipe).train(range(3))
    if factor is not None:
        with FSDP.summon_full_params(run.model), torch.no_grad():
            for parameter in run.model.parameters():
                parameter.mul_(factor)
    with FSDP.state_dict_type(run.model, StateDictType.FULL_STATE_DICT):
        weights, states = run.model.state_dict(), FSDP.optim_state_dict(run.model, run.optimizer)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": states}, file)


def test_a_gathered_checkpoint_exports_exact_weights(ranks, tmp_path):
    ranks(4, saved_whole, tmp_path / "whole.pt")
    export_file(tmp_path / "whole.pt", tmp_path / "fp32.pt")
    expected = reference(EVEN, RECIPES[0], steps=3)
    found = torch.load(tmp_path / "fp32.pt", weights_only=True)
    assert found.keys() == make_model().state_dict().keys()
    for name, weight in found.items():
        exact = expected[name].float()
        if weight.ndim < 2:
            exact = join16(expected[name], expected[f"{name}/remainder16"])
        assert torch.equal(weight, exact), name


def test_a_checkpoint_after_a_write_has_no_remainders_of_the_old_weights(ranks, tmp_path):
    ranks(4, saved_whole, tmp_path / "whole.pt", RECIPES[1], 0.75)
    export_file(tmp_path / "whole.pt", tmp_path / "fp32.pt")
    weights = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    found = torch.load(tmp_path / "fp32.pt", weights_only=True)
    for name, weight in found.items():
        assert torch.equal(weight, weights[name].float()), name


def trained_between(case, recipe, before, after, steps):
    run = Run(case, recipe)
    if before:
        run.load(before)
    run.train(steps).save(after)
    return run.parts()


@every_recipe
def test_a_checkpoint_continues_on_another_number_of_ranks(ranks, recipe, tmp_path):
    """A few steps each way, with a distributed checkpoint between."""
    ways = [
        Case("fsdp1", (4,)),
        Case("fsdp1", (3,)),
        Case("fsdp1-grad-op", (2,)),
        Case("fsdp1-hybrid", (2, 2)),
        Case("fsdp1", (1,)),
    ]
    each, before = STEPS // len(ways), None
    for number, case in enumerate(ways):
        after, steps = tmp_path / str(number), range(each * number, each * (number + 1))
        found = ranks(case.world, trained_between, case, recipe, before, after, steps)
        before = after
    assert_same(reference(EVEN, recipe), joined(found))


def transposed():
    model = torch_bf16.cast_model(make_model(), RECIPES[0])
    model.up.weight.data = model.up.weight.data.t().contiguous().t()
    return model


def cut_before():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = torch_bf16.cast_model(nn.Linear(8, 8), RECIPES[0])
    model = parallelize_module(model, mesh["tp"], ColwiseParallel())
    return FSDP(model, device_mesh=mesh["dp"], use_orig_params=True, device_id=torch.device("cpu"))


BLOCKS = torch_bf16.get_recipe(RECIPES[0], exp_avg="int8")
SUMS = torch_bf16.get_recipe(RECIPES[0], accumulate="bf16_stochastic")
REFUSED = {
    "blocks": (
        "cuts tensors anywhere",
        lambda _: torch_bf16.AdamW(
            Run(Case("fsdp1", (4,), (8, 64, 64)), RECIPES[0]).model.parameters(), recipe=BLOCKS
        ),
    ),
    "sums": (
        "FSDP1 sums them itself",
        lambda run: torch_bf16.AdamW(run.model.parameters(), recipe=SUMS),
    ),
    "release": (
        "FSDP1 reduces them",
        lambda run: torch_bf16.release_gradients(run.model, run.optimizer),
    ),
    "average": ("cannot be copied", lambda run: torch_bf16.EMA(run.model)),
    "transposed": (
        "is 'weight', which was not contiguous when FSDP1 flattened it",
        lambda _: unnamed(shard(transposed(), CASE), RECIPES[0]),
    ),
    "transposed without sharding": (
        "is 'weight', which was not contiguous when FSDP1 flattened it",
        lambda _: unnamed(shard(transposed(), Case("fsdp1-no-shard", (4,))), RECIPES[0]),
    ),
    "tensor parallelism": (
        "'weight', which tensor parallelism had cut before FSDP1 flattened it",
        lambda _: unnamed(cut_before(), RECIPES[0]),
    ),
    "export": (
        "in pieces on all ranks",
        lambda run: torch_bf16.fp32_state_dict(run.model, run.optimizer),
    ),
}


def refused(what):
    match, call = REFUSED[what]
    run = Run(CASE, RECIPES[0])
    with pytest.raises(NotImplementedError, match=match):
        call(run)


@pytest.mark.parametrize("what", REFUSED)
def test_what_parts_of_tensors_cannot_do_is_refused(ranks, what):
    ranks(4, refused, what)


def cast_after_wrapping(recipe):
    model = shard(make_model(), CASE)
    with pytest.raises(ValueError, match="Cast first, then wrap it"):
        torch_bf16.cast_model(model, recipe)


def test_a_cast_after_wrapping_is_refused(ranks):
    ranks(4, cast_after_wrapping, RECIPES[0])


def flat(make, recipe):
    for case in (CASE, Case("fsdp1-no-shard", (4,))):
        model = torch_bf16.cast_model(make_model(), recipe)
        model = shard(model, case, original=False)
        with pytest.raises(NotImplementedError, match="use_orig_params=True"):
            make(model, recipe)


@every_recipe
@pytest.mark.parametrize("make", [unnamed, converted])
def test_flat_parameters_are_refused(ranks, make, recipe):
    ranks(4, flat, make, recipe)


def cast_inside_a_wrapper():
    inside = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = FSDP(inside, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(inside.parameters(), lr=0.1)
    for model in (inside, inside[1], wrapped):
        with pytest.raises(ValueError, match="inside FullyShardedDataParallel, which has copied"):
            torch_bf16.prepare(model, optimizer)
    # The wrapper works as before.
    wrapped(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_what_a_wrapper_has_flattened_is_not_cast_without_it(ranks):
    ranks(1, cast_inside_a_wrapper)
