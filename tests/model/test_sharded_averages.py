"""Averages of sharded models: the bits of one process, however the model is cut."""

from __future__ import annotations

import functools
from contextlib import suppress

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sharded_models import ALONE, EVEN, UNEVEN, Case, held, local, make_model, mesh_of, shard
from sharded_training import RECIPES, Part, Run, assert_same, joined
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import torch_bf16
from torch_bf16 import EMA

STEPS, DECAY = 4, 0.9
FORMATS = ("fp32", "bf16_stochastic")
CASES = [
    Case("fsdp2", (2,)),
    Case("fsdp2", (3,), UNEVEN),
    Case("fsdp2-columns", (2,)),
    Case("hsdp", (2, 2), UNEVEN),
    Case("tp", (2,)),
    Case("fsdp2+tp", (2, 2)),
]
every_format = pytest.mark.parametrize("format", FORMATS)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def parts_of(ema, case):
    """This rank's elements of every average."""
    return {
        name: Part(*held(case)[name], local(average).reshape(-1).clone())
        for name, average in ema.module.named_parameters()
    }


def train(run, ema, steps):
    """With an average of what the weights stand for after each step."""
    for step in steps:
        run.train([step])
        ema.update_parameters(run.model, run.optimizer)


def averaged(case, recipe, format, backend="eager"):
    run = Run(case, recipe, backend=backend)
    ema = EMA(run.model, DECAY, format=format, backend=backend)
    train(run, ema, range(STEPS))
    return parts_of(ema, case)


@functools.cache
def reference(sizes, recipe, format):
    return joined([averaged(Case(ALONE.way, ALONE.mesh, sizes), recipe, format)])


@pytest.mark.parametrize("case", CASES, ids=Case.id)
@every_format
def test_averages_have_the_bits_of_one_process(ranks, case, format):
    # A master is added to the weight before the average is told, so one recipe for each format.
    recipe = RECIPES[FORMATS.index(format)]
    backend = ("cpu", "eager")[CASES.index(case) % 2]
    found = ranks(case.world, averaged, case, recipe, format, backend)
    assert_same(reference(case.sizes, recipe, format), joined(found))


def averaged_between(case, recipe, format, before, after, steps):
    run = Run(case, recipe)
    ema = EMA(run.model, DECAY, format=format)
    if before:
        run.load(before / "run")
        states = ema.state_dict()
        dcp.load(states, checkpoint_id=before / "ema")
        ema.load_state_dict(states)
    train(run, ema, steps)
    run.save(after / "run")
    dcp.save(ema.state_dict(), checkpoint_id=after / "ema")
    return parts_of(ema, case)


@every_format
def test_a_checkpoint_continues_sharded_in_another_way(ranks, format, tmp_path):
    recipe, before = RECIPES[1], None
    for number, case in enumerate([Case("fsdp2", (4,)), Case("fsdp2+tp", (1, 2))]):
        after, steps = tmp_path / str(number), range(2 * number, 2 * number + 2)
        arguments = case, recipe, format, before, after, steps
        found, before = ranks(case.world, averaged_between, *arguments), after
    assert_same(reference(EVEN, recipe, format), joined(found))


def evaluated(case, recipe):
    """What the model says before, within and after a swap, and the averages; then it goes on."""
    run = Run(case, recipe)
    ema = EMA(run.model, DECAY)
    train(run, ema, range(2))
    x = torch.randn(3, case.sizes[0], generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        # A pass without backward, after which FSDP2 keeps what the root has gathered.
        said = [run.model(x)]
        with suppress(InterruptedError), ema.swapped(run.model):
            said.append(run.model(x))
            raise InterruptedError
        with ema.swapped(run.model):
            said.append(run.model(x))
        said.append(run.model(x))
    # What a backward pass does.
    getattr(run.model, "reshard", lambda: None)()
    train(run, ema, range(2, STEPS))
    return x, said, parts_of(ema, case), run.train(range(STEPS, 2 * STEPS)).parts()


@every_recipe
@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=Case.id)
def test_a_swapped_model_computes_with_the_average_and_trains_on_as_if_it_had_not(
    ranks, case, recipe
):
    x, said, averages, parts = zip(*ranks(case.world, evaluated, case, recipe), strict=True)
    before, during, again, after = said[0]
    assert torch.equal(during, again)
    assert torch.equal(before, after)
    assert not torch.equal(before, during)
    run = Run(Case(ALONE.way, ALONE.mesh, case.sizes), recipe)
    ema = EMA(run.model, DECAY)
    train(run, ema, range(2))
    with torch.no_grad(), ema.swapped(run.model):
        assert torch.equal(run.model(x[0]), during)
    train(run, ema, range(2, STEPS))
    assert_same(joined([parts_of(ema, run.case)]), joined(averages))
    assert_same(joined([run.train(range(STEPS, 2 * STEPS)).parts()]), joined(parts))


def gathered(case):
    """The whole average that rank 0 gathers, and its parts."""
    run = Run(case, RECIPES[1])
    ema = EMA(run.model, DECAY)
    train(run, ema, range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(ema.module, options=options), parts_of(ema, case)


@pytest.mark.parametrize("case", [CASES[1], CASES[5]], ids=Case.id)
def test_a_whole_average_loads_into_a_model_that_is_not_sharded(ranks, case):
    (whole, *_), parts = zip(*ranks(case.world, gathered, case), strict=True)
    assert_same(joined(parts), whole)
    make_model(case.sizes).load_state_dict(whole)


def refused(case):
    model = torch_bf16.cast_model(make_model(case.sizes))
    early = EMA(model)
    shard(model, case, mesh_of(case))
    ema, said = EMA(model), []
    for call in (
        lambda: ema(torch.ones(2, case.sizes[0])),
        lambda: early.update_parameters(model),
        lambda: early.swapped(model).__enter__(),
        lambda: EMA(model, device="cpu"),
    ):
        with pytest.raises((NotImplementedError, ValueError)) as error:
            call()
        said.append(str(error.value))
    return said


def test_what_cannot_be_is_refused_by_name(ranks):
    for each in ranks(2, refused, Case("fsdp2", (2,))):
        forward, early, swap, device = each
        assert "within `with ema.swapped(model): ...`" in forward
        for said, method in ((early, "update_parameters"), (swap, "swapped")):
            assert said.startswith(f"{method}: 'scale' is placed as") or "'kernel'" in said
            assert said.endswith("whole on each rank; make the EMA after the model is sharded")
        assert "device='cpu' for a sharded FSDPModel" in device
