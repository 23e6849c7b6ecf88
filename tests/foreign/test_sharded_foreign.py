"""Sharded optimizers without a fused rule end with the bits of one process, resumed anywhere."""

import random

import pytest
import torch
from sharded_foreign import KINDS, STEPS, foreign_run
from sharded_models import ALONE, EVEN, UNEVEN, WIDE, Case, local
from sharded_training import RECIPES, assert_same, joined, plain, reference
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

STOCHASTIC, EXACT = RECIPES
CASES = [
    (Case("fsdp2", (4,), UNEVEN), "rprop", STOCHASTIC),
    (Case("fsdp2", (4,), UNEVEN), "rows", EXACT),
    (Case("fsdp2", (4,), UNEVEN), "normed", STOCHASTIC),
    (Case("fsdp2-columns", (2,)), "amsgrad", STOCHASTIC),
    (Case("fsdp2-columns", (2,)), "trust", STOCHASTIC),
    (Case("hsdp", (2, 2), UNEVEN), "adamax", EXACT),
    (Case("hsdp", (2, 2), UNEVEN), "trust", EXACT),
    (Case("tp", (3,), UNEVEN), "rprop", EXACT),
    (Case("tp", (3,), UNEVEN), "trust", STOCHASTIC),
    (Case("fsdp2+tp", (2, 2), (6, 10, 6)), "adamax", STOCHASTIC),
    (Case("fsdp2+tp", (2, 2), (6, 10, 6)), "rows", STOCHASTIC),
    (Case("fsdp2", (3,), WIDE), "amsgrad", "bytes"),
    (Case("fsdp2", (3,), WIDE), "trust", "bytes"),
    (Case("ddp", (2,)), "normed", STOCHASTIC),
]
FSDP1 = Case("fsdp1", (4,), UNEVEN)


def expected(case, kind, recipe):
    return reference(case.sizes, recipe, KINDS[kind], STEPS)


def trained(case, kind, recipe):
    return foreign_run(case, kind, recipe).train(range(STEPS)).parts()


@pytest.mark.parametrize(
    ("case", "kind", "recipe"),
    CASES,
    ids=[case.id(kind, recipe) for case, kind, recipe in CASES],
)
def test_weights_and_states_equal_one_process(ranks, case, kind, recipe):
    found = ranks(case.world, trained, case, kind, recipe)
    assert_same(expected(case, kind, recipe), joined(found))


def trained_and_saved(case, kind, recipe, folder):
    """Half of the steps; also returns whole state dicts."""
    run = foreign_run(case, kind, recipe).train(range(STEPS // 2))
    run.save(folder)
    options = StateDictOptions(full_state_dict=True)
    return plain(get_state_dict(run.model, run.optimizer, options=options))


def loaded_and_trained(case, kind, recipe, folder, whole):
    run = foreign_run(case, kind, recipe)
    if folder:
        run.load(folder)
    else:
        run.put(whole, StateDictOptions(full_state_dict=True))
    return run.train(range(STEPS // 2, STEPS)).parts()


WAYS = [
    (Case("fsdp2", (4,)), Case("fsdp2+tp", (2, 2))),
    (Case("tp", (4,)), Case("hsdp", (2, 2))),
]
# Every pair of them: a checkpoint knows nothing of the rule, and where it is read nothing of both.
ELSEWHERE = [
    pytest.param(*rule, *ways, to, id=f"{ways[0].id()}-to-{ways[1].way}-{rule[0]}-{to}")
    for number, to in enumerate(["another mesh", "one process", "another mesh from whole states"])
    for rule, ways in zip(
        [("amsgrad", STOCHASTIC), ("rows", EXACT)], WAYS[:: -1 if number % 2 else 1], strict=True
    )
]


@pytest.mark.parametrize(("kind", "recipe", "before", "after", "to"), ELSEWHERE)
def test_a_checkpoint_continues_elsewhere(ranks, kind, recipe, before, after, to, tmp_path):
    """Half of the steps one way, the others another."""
    saved = ranks(before.world, trained_and_saved, before, kind, recipe, tmp_path)
    whole = dict(zip(("model", "optimizer"), saved[0], strict=True))
    if to == "one process":
        found = [loaded_and_trained(ALONE, kind, recipe, None, whole)]
    else:
        folder = tmp_path if to == "another mesh" else None
        found = ranks(after.world, loaded_and_trained, after, kind, recipe, folder, whole)
    assert_same(expected(Case("alone", (1,), EVEN), kind, recipe), joined(found))


def trained_under_fsdp1(recipe, resumed):
    """What looks at single elements goes through FSDP1, too."""
    run = foreign_run(FSDP1, "amsgrad", recipe).train(range(STEPS // 2))
    if resumed:
        before, weights = run, run.model.state_dict()
        run = foreign_run(FSDP1, "amsgrad", recipe)
        run.model.load_state_dict(weights)
        RESUMED[resumed](before, run)
    return run.train(range(STEPS // 2, STEPS)).parts()


def from_every_rank(before, after):
    states = get_optimizer_state_dict(before.model, before.optimizer)
    set_optimizer_state_dict(after.model, after.optimizer, states)


def from_rank_0(before, after):
    """As Accelerate does: the states of all ranks are saved and loaded by one of them."""
    # torch itself reads freed memory where it offloads to the CPU what is there.
    config = FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True)
    full = StateDictType.FULL_STATE_DICT, FullStateDictConfig(), config
    with FSDP.state_dict_type(before.model, *full):
        states = FSDP.optim_state_dict(before.model, before.optimizer)
    with FSDP.state_dict_type(after.model, *full):
        states = FSDP.optim_state_dict_to_load(after.model, after.optimizer, states)
    after.optimizer.load_state_dict(states)


RESUMED = {"resumed": from_every_rank, "resumed-from-rank-0": from_rank_0}


@pytest.mark.parametrize("resumed", ["", *RESUMED], ids=["straight", *RESUMED])
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_on_elements_go_through_fsdp1(ranks, recipe, resumed):
    found = ranks(FSDP1.world, trained_under_fsdp1, recipe, resumed)
    assert_same(expected(FSDP1, "amsgrad", recipe), joined(found))


def refused(case, kind, match):
    run = foreign_run(case, kind, STOCHASTIC)
    parameters = [*run.model.parameters()]
    before = [local(p).clone() for p in parameters]
    run.give(0)
    state = random.getstate(), torch.get_rng_state()
    with pytest.raises(NotImplementedError, match=match):
        run.optimizer.step()
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
    assert all(map(torch.equal, before, map(local, parameters)))
    assert not any(state["noise_step"] for state in run.optimizer.state.values())


@pytest.mark.parametrize(
    ("case", "kind", "match"),
    [
        (Case("fsdp2", (4,)), "draws", "draws random numbers"),
        (Case("fsdp2", (4,)), "tosses", "draws random numbers"),
        (FSDP1, "trust", "is sharded by FSDP1, and the step of .* is not known to be elementwise"),
        (FSDP1, "normed", "is sharded by FSDP1, and the step of .* is not known to be elem"),
    ],
    ids=["fsdp2-draws", "fsdp2-tosses", "fsdp1-trust", "fsdp1-normed"],
)
def test_what_cannot_be_right_is_refused_and_nothing_is_updated(ranks, case, kind, match):
    ranks(case.world, refused, case, kind, match)
