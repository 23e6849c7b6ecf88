"""Averages of sharded models: the bits of one process, however the model is cut."""

from __future__ import annotations

import functools
from contextlib import suppress

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sharded_models import ALONE, EVEN, UNEVEN, Case, held, local, make_model, mesh_of, shard
from sharded_training import RECIPES, Part, Run, assert_same, joined
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

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
        # One that ends within the root's, which FSDP2 would keep gathered.
        with suppress(RuntimeError), ema.swapped(run.model):
            said.append(run.model(x))
            run.model(x[:, 1:])
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


class Intricate(nn.Module):
    """Tied weights, and a buffer that two modules share."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.tokens.weight
        self.mix = nn.Linear(4, 4)
        for each in (self.tokens, self.mix):
            each.register_buffer("mask", torch.ones(4))
        self.mix.mask = self.tokens.mask
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x):
        return self.head(self.mix(self.tokens(x)) * self.mix.mask)


def intricate():
    """The names in the average of a checkpointed, sharded model, and in that of a plain one."""
    plain, model = Intricate(), Intricate()
    model.mix = checkpoint_wrapper(model.mix)
    torch_bf16.cast_model(model)
    fully_shard(model.mix)
    fully_shard(model)
    ema = EMA(model, DECAY, use_buffers=True)
    for _ in range(2):
        ema.update_parameters(model)
    with ema.swapped(model), torch.autocast("cpu", torch.bfloat16):
        model(torch.tensor([[1, 2]]))
    assert ema.module.head.weight is ema.module.tokens.weight
    options = StateDictOptions(full_state_dict=True)
    whole = get_model_state_dict(ema, options=options)
    again = EMA(model, DECAY)
    set_model_state_dict(again, whole, options=options)
    assert again.n_averaged == 2
    return sorted(ema.state_dict()), sorted(EMA(plain).state_dict()), sorted(whole)


def test_an_intricate_model_has_the_average_that_it_has_in_one_process(ranks):
    for names, expected, whole in ranks(2, intricate):
        assert names == expected
        assert set(whole) <= set(expected)


def placed_otherwise(case):
    mesh = mesh_of(case)
    whole, part = torch.ones(4, 4), distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    move = torch_bf16.ema_multi_avg_fn(0.5)
    for pair in ((whole, part), (part, whole), (whole, torch.ones(2, 4))):
        with pytest.raises(ValueError, match="Nothing was averaged"):
            move(pair[:1], pair[1:], 2)
    assert whole.sum() == 16.0


def test_what_is_placed_otherwise_is_not_averaged(ranks):
    ranks(2, placed_otherwise, Case("tp", (2,)))


def without_memory(case):
    with torch.device("meta"):
        model = make_model(case.sizes)
    shard(model, case, mesh_of(case))
    with pytest.raises(ValueError, match="on the meta device, which have no numbers to average"):
        EMA(model)


def test_a_model_on_the_meta_device_is_refused(ranks):
    ranks(2, without_memory, Case("fsdp2", (2,)))


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
            assert said.startswith(f"{method}: 'kernel' is placed as (Shard(dim=0),) on ")
            assert "and its average is whole on each rank, of shape (24, 2, 3); make the" in said
        assert "device='cpu' for a sharded FSDPModel" in device
