"""Rules that look at whole tensors, over shards: the bits of one process, however they are cut."""

import logging

import pytest
import torch
import torch.distributed as dist
from sharded_models import EVEN, THIRDS, UNEVEN, WIDE, Case, local
from sharded_training import RECIPES, Run, assert_same, joined, reference

import torch_bf16

STEPS = 4


def muon(model, recipe):
    groups = torch_bf16.param_groups(model, weight_decay=0.1, muon=True)
    return torch_bf16.Muon(groups, lr=0.02, recipe=recipe)


def adafactor(model, recipe):
    return torch_bf16.Adafactor(model.named_parameters(), weight_decay=0.1, recipe=recipe)


def summing(model, recipe):
    """Both rules that sum a number over a tensor first."""
    named = [*model.named_parameters()]
    groups = [
        {"params": [each for each in named if each[0].endswith("weight")], "cautious": True},
        {"params": [each for each in named if not each[0].endswith("weight")]},
    ]
    groups[1]["update_clipping"] = True
    return torch_bf16.AdamW(groups, lr=0.02, weight_decay=0.1, recipe=recipe)


MAKES = [muon, adafactor, summing]
CASES = [
    *(Case("fsdp2", (n,)) for n in (1, 2, 4)),
    *(Case("fsdp2", (n,), UNEVEN) for n in (2, 3, 4)),
    Case("fsdp2-columns", (2,)),
    Case("hsdp", (2, 2), UNEVEN),
    *(Case("tp", (n,)) for n in (1, 2, 4)),
    Case("tp", (3,), UNEVEN),
    Case("fsdp2+tp", (2, 2)),
    Case("fsdp2+tp", (3, 1), THIRDS),
    *(Case("fsdp1", (n,)) for n in (1, 2, 4)),
    *(Case("fsdp1", (n,), UNEVEN) for n in (2, 3, 4)),
    Case("fsdp1-hybrid", (2, 2), UNEVEN),
]
BYTES = [
    *(Case("fsdp2", (n,), WIDE) for n in (2, 3, 4)),
    Case("fsdp2-columns", (2,), WIDE),
    Case("fsdp2+tp", (2, 2), WIDE),
]


def trained(cases, recipes, make):
    runs = zip(cases, recipes, strict=True)
    return [Run(case, recipe, make).train(range(STEPS)).parts() for case, recipe in runs]


def in_worlds(cases):
    """The cases by their numbers of ranks: one launch each."""
    return {n: [each for each in cases if each.world == n] for n in {each.world for each in cases}}


def trains_as_one_process(ranks, world, cases, recipes, make):
    found = zip(*ranks(world, trained, cases, recipes, make), strict=True)
    for case, recipe, parts in zip(cases, recipes, found, strict=True):
        assert_same(reference(case.sizes, recipe, make, STEPS), joined(parts), case.id())


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("make", MAKES)
def test_weights_and_states_equal_one_process(ranks, make, world):
    # Two rules for most cases, and the recipes in turn: what a rule gathers does not know how it is
    # rounded.
    turn = MAKES.index(make)
    cases = [
        each
        for n, each in enumerate(in_worlds(CASES)[world])
        # On a mesh of two dimensions sums go over both.
        if (n + turn) % len(MAKES) or each.way == "fsdp2+tp"
    ]
    recipes = [RECIPES[(turn + n) % 2] for n in range(len(cases))]
    trains_as_one_process(ranks, world, cases, recipes, make)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("make", [muon, summing])
def test_momentum_in_blocks_of_bytes_equals_one_process(ranks, make, world):
    cases = in_worlds(BYTES)[world]
    trains_as_one_process(ranks, world, cases, ["bytes"] * len(cases), make)


def trained_between(case, recipe, make, before, after, steps):
    run = Run(case, recipe, make)
    if before:
        run.load(before)
    run.train(steps).save(after)
    return run.parts()


WAYS = {
    "fsdp2": [Case("fsdp2", (2,)), Case("fsdp2+tp", (2, 2)), Case("tp", (2,)), Case("fsdp2", (1,))],
    "fsdp1": [
        Case("fsdp1", (2,)),
        Case("fsdp1-no-shard", (2,)),
        Case("fsdp1", (4,)),
        Case("fsdp1-hybrid", (2, 2)),
    ],
}


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("make", MAKES)
def test_a_checkpoint_continues_on_another_number_of_ranks(ranks, make, ways, tmp_path):
    recipe, before, steps = RECIPES[1], None, 2
    for number, case in enumerate(WAYS[ways]):
        after, part = tmp_path / str(number), range(steps * number, steps * (number + 1))
        found = ranks(case.world, trained_between, case, recipe, make, before, after, part)
        before = after
    assert_same(reference(EVEN, recipe, make, part.stop), joined(found))


def theirs(model, recipe):
    """torch's Muon of the matrices alone, converted."""
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
    return torch_bf16.convert(torch.optim.Muon(matrices, lr=0.02), recipe, backend="eager")


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has it since 2.9")
def test_torchs_muon_converts_over_shards(ranks):
    case = Case("fsdp2", (2,))
    found = joined([each for (each,) in ranks(2, trained, [case], RECIPES[:1], theirs)])
    assert_same(reference(EVEN, RECIPES[0], theirs, STEPS), found)
    assert found["up.weight/momentum_buffer"].any()


def backward(release, make):
    """After backward passes, with gradients released in them or not."""
    case = Case("fsdp2", (2,))
    run = Run(case, RECIPES[0], make)
    if release:
        torch_bf16.release_gradients(run.model, run.optimizer)
    for step in range(3):
        torch.manual_seed(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = run.model(torch.randn(6, case.sizes[0])).float().square().mean()
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run.parts()


@pytest.mark.parametrize("make", MAKES)
def test_released_gradients_step_as_others(ranks, make):
    released, whole = (joined(ranks(2, backward, each, make)) for each in (True, False))
    assert_same(whole, released)


def skipping(case, make, who):
    """Three steps, of which some ranks are told to skip the second; the warnings of this one."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("torch_bf16").addHandler(handler)
    run = Run(case, RECIPES[0], make)
    for step in range(3):
        run.give(step)
        if step == 1:
            run.optimizer.skip_next_step_where(torch.tensor(float(dist.get_rank() in who)))
        run.optimizer.step()
    logging.getLogger("torch_bf16").removeHandler(handler)
    return run.parts(), run.optimizer.skipped_steps, [each for each in said if "found_inf" in each]


@pytest.mark.parametrize(
    "case", [Case("fsdp2", (2,)), Case("fsdp1", (4,)), Case("fsdp2+tp", (2, 2))], ids=Case.id
)
@pytest.mark.parametrize("make", MAKES)
def test_ranks_that_disagree_about_found_inf_skip_the_step_together(ranks, make, case):
    everyone = range(case.world)
    found, counts, said = zip(
        *ranks(case.world, skipping, case, make, [1], timeout=20, seconds=60), strict=True
    )
    assert set(counts) == {1}
    assert [len(each) for each in said] == [int(rank != 1) for rank in everyone]
    together, counts, said = zip(*ranks(case.world, skipping, case, make, everyone), strict=True)
    assert set(counts) == {1}
    assert not any(said)
    assert_same(joined(together), joined(found))


def scaled(make):
    """A step under a GradScaler, after which one rank has found an infinite gradient."""
    run = Run(Case("fsdp2", (2,)), RECIPES[0], make)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = run.parts()
    scaler.scale(torch.ones(()))
    run.give(0)
    if dist.get_rank() == 1:
        for p in run.model.parameters():
            local(p.grad).fill_(torch.inf)
    scaler.step(run.optimizer)
    assert run.optimizer.skipped_steps == 1
    for name, part in run.parts().items():
        assert name not in before or torch.equal(part.elements, before[name].elements), name


@pytest.mark.parametrize("make", MAKES)
def test_an_infinite_gradient_on_one_rank_stops_nobody(ranks, make):
    ranks(2, scaled, make, timeout=20, seconds=60)


def graphed(make):
    run = Run(Case("fsdp2", (2,)), RECIPES[0], make)
    run.give(0)
    with pytest.raises(RuntimeError, match=r"of all ranks .* take ordinary steps"):
        run.optimizer.graphed()


def test_sums_of_ranks_are_refused_in_a_graph(ranks):
    ranks(2, graphed, summing)
