"""Checkpoints of sharded models: whole, asynchronous, and loaded elsewhere."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from exported import export_file
from sharded_models import ALONE, EVEN, WIDE, Case, held, local, make_model, named
from sharded_training import (
    RECIPES,
    STEPS,
    Part,
    Run,
    adamw,
    assert_same,
    joined,
    plain,
    recipe_of,
    reference,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import torch_bf16

EXACT = "bf16-fp32-master"
FSDP2, TP = Case("fsdp2", (4,)), Case("tp", (4,))
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
FIRST_HALF, LAST_HALF = range(STEPS // 2), range(STEPS // 2, STEPS)

# One matrix with more elements than 16 bits have patterns.
WHOLE = [
    Case("fsdp2", (4,), (256, 262, 3)),
    Case("fsdp2-columns", (4,), (256, 256, 4)),
    Case("fsdp2+tp", (2, 2), (256, 260, 4)),
    Case("tp", (4,), (256, 260, 4)),
]
# How a whole state dict is made: flat or nested, on every rank or on the first.
KINDS = {"nested": (False, False), "flat": (True, False), "offloaded": (False, True)}
EACH_KIND = [*((WHOLE[0], kind) for kind in KINDS), *zip(WHOLE[1:], KINDS, strict=True)]


def pattern(name, shape):
    """Every lower half that there is, NaNs of bf16 included, for tensors that are large enough."""
    first = sum(map(ord, name))
    return torch.arange(first, first + shape.numel()).to(torch.int16).view(shape)


def halves(run):
    """Each parameter's name, its lower halves on this rank, and what they are to be."""
    for name, parameter in named(run.model).items():
        shape, indices = held(run.case)[name]
        memory = local(run.optimizer.state[parameter]["remainder16"])
        yield name, memory, pattern(name, shape).view(-1)[indices].view(memory.shape)


def gathered_and_loaded(case, kind):
    flat, offload = KINDS[kind]
    run = Run(case, EXACT).with_state()
    for _, memory, expected in halves(run):
        memory.copy_(expected)
    options = StateDictOptions(
        full_state_dict=True, cpu_offload=offload, flatten_optimizer_state_dict=flat
    )
    whole = get_optimizer_state_dict(run.model, run.optimizer, options=options)
    assert whole or (offload and dist.get_rank())
    for name, (shape, _) in held(case).items() if whole else ():
        key = f"state.{name}.remainder16"
        found = whole[key] if flat else whole["state"][name]["remainder16"]
        assert torch.equal(found.view(torch.int16), pattern(name, shape)), name
    for from_first in (True,) if offload else (True, False):
        run = Run(case, EXACT)
        given = whole if dist.get_rank() == 0 or not from_first else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
        set_optimizer_state_dict(run.model, run.optimizer, given, options=options)
        for name, memory, expected in halves(run):
            assert memory.dtype == torch.int16, (name, from_first)
            assert torch.equal(memory, expected), (name, from_first)


@pytest.mark.parametrize(
    ("case", "kind"), EACH_KIND, ids=[f"{case.id()}-{kind}" for case, kind in EACH_KIND]
)
def test_a_whole_state_dict_has_every_bit_pattern_and_loads_again(ranks, case, kind):
    ranks(case.world, gathered_and_loaded, case, kind)


class Held(dcp.FileSystemWriter):
    """Writes nothing before it is told to."""

    def __init__(self, folder):
        super().__init__(folder)
        self.go = threading.Event()

    def write_data(self, plan, planner):
        assert self.go.wait(60)
        return super().write_data(plan, planner)


def saved_while_training(recipe, folder):
    run = Run(FSDP2, recipe).train(FIRST_HALF)
    then = run.parts()
    writer = Held(folder)
    saving = dcp.async_save(
        run.state_dicts(), storage_writer=writer, process_group=dist.new_group()
    )
    run.train(LAST_HALF)
    writer.go.set()
    saving.result(60)
    return then, run.parts()


def loaded_and_trained(case, recipe, folder, steps):
    run = Run(case, recipe).load(folder)
    return run.parts(), run.train(steps).parts()


@every_recipe
def test_an_asynchronous_save_has_the_bits_of_the_moment_of_the_call(ranks, recipe, tmp_path):
    then, end = zip(*ranks(4, saved_while_training, recipe, tmp_path), strict=True)
    assert_same(reference(EVEN, recipe), joined(end), "went on")
    found = ranks(4, loaded_and_trained, TP, recipe, tmp_path, LAST_HALF)
    loaded, end = zip(*found, strict=True)
    assert_same(joined(then), joined(loaded), "as it was then")
    assert_same(reference(EVEN, recipe), joined(end), "resumed")


def trained_and_saved(case, recipe, folder, steps):
    Run(case, recipe).train(steps).save(folder)


def loaded_trained_and_saved(case, recipe, before, after, steps):
    Run(case, recipe).load(before).train(steps).save(after)


def gathered_whole(case, recipe, folder, steps):
    """On the first rank alone."""
    run = Run(case, recipe).load(folder).train(steps)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return plain(get_state_dict(run.model, run.optimizer, options=options))


def broadcast_and_trained(case, recipe, whole, steps):
    run = Run(case, recipe)
    weights, states = whole if dist.get_rank() == 0 else ({}, {})
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # In two calls: given nothing of the model, set_state_dict does not wait for rank 0's.
    set_model_state_dict(run.model, weights, options=options)
    set_optimizer_state_dict(run.model, run.optimizer, states, options=options)
    return run.train(steps).parts()


@every_recipe
def test_a_run_goes_on_on_another_number_of_ranks_and_in_one_process(ranks, recipe, tmp_path):
    """Two ranks, DDP, tensor parallelism, one process and FSDP2 train a fifth each."""
    two, ddp = tmp_path / "two", tmp_path / "ddp"
    steps = [range(first, first + STEPS // 5) for first in range(0, STEPS, STEPS // 5)]
    ranks(2, trained_and_saved, Case("fsdp2", (2,)), recipe, two, steps[0])
    ranks(4, loaded_trained_and_saved, Case("ddp", (4,)), recipe, two, ddp, steps[1])
    whole, *others = ranks(4, gathered_whole, TP, recipe, ddp, steps[2])
    assert not any(map(any, others))
    run = Run(ALONE, recipe).put(dict(zip(("model", "optimizer"), whole, strict=True)))
    whole = plain([*run.train(steps[3]).state_dicts().values()])
    found = ranks(4, broadcast_and_trained, FSDP2, recipe, whole, steps[4])
    assert_same(reference(EVEN, recipe), joined(found))


def empty_adamw(model, recipe):
    return adamw(model.to_empty(device="cpu"), recipe)


def built_on_meta(folder):
    """A model that never had weights of its own loads those of a file, and its masters."""
    with torch.device("meta"):
        model = make_model(EVEN)
    run = Run(FSDP2, EXACT, empty_adamw, model=torch_bf16.cast_model(model, recipe_of(EXACT)))
    return run.load(folder).train(LAST_HALF).parts()


def test_a_model_built_on_meta_loads_weights_and_masters(ranks, tmp_path):
    ranks(4, trained_and_saved, FSDP2, EXACT, tmp_path, FIRST_HALF)
    assert_same(reference(EVEN, EXACT), joined(ranks(4, built_on_meta, tmp_path)))


def elements(run):
    return {name: part.elements for name, part in run.parts().items()}


def saved_as_a_file(case, file):
    run = Run(case, EXACT).train(range(2))
    parts = dict(zip(("model", "optimizer"), (run.model, run.optimizer), strict=True))
    if dist.get_rank() == 0:
        match = r"'model\.\w+' is sharded.*full_state_dict=True.*Nothing was written"
        with pytest.raises(torch_bf16.CheckpointError, match=match):
            torch_bf16.save_checkpoint(file, **parts)
        torch.save({name: each.state_dict() for name, each in parts.items()}, file)
        with pytest.raises(torch_bf16.CheckpointError, match=r"sharded.*Nothing was written"):
            export_file(file, file.with_name("weights.pt"))
        assert [each.name for each in file.parent.iterdir()] == [file.name]
    # What the message offers.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_state_dict(run.model, run.optimizer, options=options)
    if dist.get_rank() == 0:
        torch_bf16.save_checkpoint(file, **dict(zip(parts, whole, strict=True)))
        export_file(file, file.with_name("weights.pt"))
    dist.barrier()
    again = Run(case, EXACT)
    untouched = elements(again)
    with pytest.raises(torch_bf16.CheckpointError, match=r"whole tensor.*full_state_dict=True"):
        torch_bf16.load_checkpoint(file, model=again.model, optimizer=again.optimizer)
    assert_same(untouched, elements(again))
    again.put(torch_bf16.load_checkpoint(file), StateDictOptions(full_state_dict=True))
    assert_same(elements(run), elements(again))


def test_one_ranks_part_is_not_saved_as_if_it_were_all(ranks, tmp_path):
    ranks(2, saved_as_a_file, Case("fsdp2", (2,)), tmp_path / "run.pt")
    assert set(torch_bf16.load_checkpoint(tmp_path / "run.pt")) == {"model", "optimizer"}


def fp32_moments(case):
    run = Run(case, "bytes").train(range(2))
    states = torch_bf16.fp32_optimizer_state_dict(run.optimizer)["state"].values()
    return {
        f"{name}/{key}": Part(*held(case)[name], local(state[key]).reshape(-1))
        for name, state in zip(named(run.model), states, strict=True)
        for key in ("exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize("case", [Case("fsdp2", (3,), WIDE), Case("tp", (2,), WIDE)], ids=Case.id)
def test_moments_in_blocks_become_fp32_numbers_where_they_lie(ranks, case):
    expected = joined([fp32_moments(Case(ALONE.way, ALONE.mesh, WIDE))])
    assert_same(expected, joined(ranks(case.world, fp32_moments, case)))
