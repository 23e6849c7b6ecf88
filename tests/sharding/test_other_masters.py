"""Whole state dicts whose exact masters are in another format than the optimizer's."""

import pytest
import torch
import torch.distributed as dist
from sharded_models import ALONE, EVEN, Case, held, local, make_model, named
from sharded_training import RECIPES, STEPS, Part, Run, adamw, assert_same, joined
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import torch_bf16
from torch_bf16 import StateMismatchError, torch_patches

EXACT = "bf16-fp32-master"
BESIDE = torch_bf16.get_recipe(EXACT, weights="bf16+fp32")
LESS = torch_bf16.get_recipe("bf16-stochastic", weights="bf16+8")
HALF = STEPS // 2
# Shards without elements, of units of which only some parameters have a kind of remainder.
FEW = (2, 3, 1)
FSDP1, FSDP2, DDP = Case("fsdp1", (4,)), Case("fsdp2", (4,)), Case("ddp", (4,))
NO_SHARD = Case("fsdp1-no-shard", (4,))


def exact_parts(run):
    return {
        name: Part(*held(run.case)[name], local(run.optimizer.exact_weight(p)).reshape(-1))
        for name, p in named(run.model).items()
    }


def moved(before, after, recipes, from_first=False):
    """Trained by halves in two ways, with a whole state dict between them."""
    first = Run(before, recipes[0]).train(range(HALF))
    options = StateDictOptions(full_state_dict=True)
    weights, states = get_state_dict(first.model, first.optimizer, options=options)
    if from_first and dist.get_rank():
        weights, states = {}, {}
    run = Run(after, recipes[1])
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
    set_model_state_dict(run.model, weights, options=options)
    set_optimizer_state_dict(run.model, run.optimizer, states, options=options)
    return exact_parts(run.train(range(HALF, STEPS)))


def check_bits(found, sizes, recipe):
    alone = Run(Case(ALONE.way, ALONE.mesh, sizes), recipe).train()
    assert_same(joined([exact_parts(alone)]), joined(found))


@pytest.mark.parametrize("after", [FSDP2, DDP, FSDP1], ids=lambda case: case.way)
@pytest.mark.parametrize("before", [FSDP2, FSDP1], ids=lambda case: case.way)
def test_another_format_of_masters_keeps_every_bit(ranks, before, after):
    for recipes in ((EXACT, BESIDE), (BESIDE, EXACT)):
        check_bits(ranks(4, moved, before, after, recipes), EVEN, EXACT)


@pytest.mark.parametrize("recipe", [*RECIPES, LESS], ids=[*RECIPES, "bf16+8"])
@pytest.mark.parametrize("after", [FSDP2, DDP], ids=lambda case: case.way)
def test_a_run_goes_from_fsdp1_to_others(ranks, after, recipe):
    before, after = (Case(each.way, each.mesh, FEW) for each in (FSDP1, after))
    check_bits(ranks(4, moved, before, after, (recipe, recipe)), FEW, recipe)


def refused(*arguments):
    with pytest.raises(StateMismatchError, match=r"has \w+ of '\w.*but rank 0.*on every rank"):
        moved(*arguments, from_first=True)


@pytest.mark.parametrize(
    ("before", "after", "recipes"),
    [
        (FSDP1, FSDP2, (RECIPES[0], RECIPES[0])),
        (NO_SHARD, DDP, (EXACT, EXACT)),
        (FSDP2, FSDP2, (EXACT, BESIDE)),
    ],
    ids=["fsdp1-to-fsdp2", "no-shard-to-ddp", "another-recipe"],
)
def test_a_broadcast_that_only_the_first_rank_would_get_is_refused(ranks, before, after, recipes):
    ranks(4, refused, before, after, recipes)


def test_masters_that_no_rank_keeps_are_broadcast_and_dropped(ranks):
    recipes = EXACT, RECIPES[0]
    found = [ranks(4, moved, FSDP2, FSDP2, recipes, each) for each in (True, False)]
    assert_same(*map(joined, found))


def broadcast_weights():
    """To ranks of which only the first has made a state dict of its optimizer before."""
    torch_patches.restore()
    run, weights = Run(FSDP2, EXACT), {}
    if dist.get_rank() == 0:
        run.optimizer.state_dict()
        weights = {name: each.clone() for name, each in make_model(EVEN).state_dict().items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(run.model, weights, options=options)


def test_weights_are_broadcast_to_ranks_without_a_state_dict(ranks):
    ranks(4, broadcast_weights)


def broadcast_transposed(way):
    """The state of a run with transposed weights, to ranks whose weights are in rows."""
    first = torch_bf16.cast_model(make_model(EVEN), EXACT)
    for each in first.parameters():
        if each.ndim == 2:
            each.data = each.data.t().contiguous().t()
    optimizer = adamw(first, EXACT)
    for each in first.parameters():
        each.grad = torch.randn(each.shape, generator=torch.Generator().manual_seed(0)).to(each)
    optimizer.step()
    states = get_optimizer_state_dict(first, optimizer)
    run = Run(Case(way, (2,)), EXACT)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = states if dist.get_rank() == 0 else {}
    set_optimizer_state_dict(run.model, run.optimizer, given, options=options)
    for name, parameter in named(run.model).items():
        _, indices = held(run.case)[name]
        # FSDP1 gives no state to a rank without elements.
        for key, each in states["state"][name].items() if len(indices) else ():
            part = local(run.optimizer.state[parameter][key]).reshape(-1)
            if key == "remainder16":  # shown as bf16, in which some are a NaN
                each = each.view(torch.int16)
            if key != "step":
                assert torch.equal(part, each.reshape(-1)[indices]), (name, key)


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "fsdp1"])
def test_states_in_any_order_are_broadcast_to_ranks_in_rows(ranks, way):
    ranks(2, broadcast_transposed, way)
