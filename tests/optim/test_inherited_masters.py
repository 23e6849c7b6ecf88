"""A second training of the same weights goes on from the masters of the first."""

import copy
import gc
import pickle
from collections import defaultdict

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16.engine import engine
from torch_bf16.living import LivingSet
from torch_bf16.model import remainders
from torch_bf16.numerics.rounding import split16
from torch_bf16.optim import inherited_masters
from torch_bf16.sharding import shard_of

RECIPES = {
    "bf16-fp32-master": torch_bf16.get_recipe("bf16-fp32-master"),
    "bf16+fp32": torch_bf16.get_recipe("bf16-stochastic", weights="bf16+fp32"),
}


def make(model, recipe):
    return torch_bf16.SGD(model.parameters(), lr=1e-6, recipe=recipe, backend="eager")


def step(optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


def exact(model, optimizer):
    return [optimizer.exact_weight(p) for p in model.parameters()]


@pytest.fixture(params=RECIPES)
def recipe(request):
    return RECIPES[request.param]


def test_an_inherited_master_half_way_between_two_bf16_numbers_is_read_exactly():
    model = torch_bf16.cast_model(nn.Linear(4, 1, bias=False), RECIPES["bf16+fp32"])
    first = make(model, RECIPES["bf16+fp32"])
    # Rounded to even the first goes down, away from zero up: formats differ in it.
    halves = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.75]])
    first.set_exact_weight(model.weight, halves)
    second = make(model, RECIPES["bf16+fp32"])
    assert torch.equal(second.exact_weight(model.weight), halves)
    model.weight.grad = torch.zeros_like(model.weight)
    second.step()
    assert torch.equal(second.exact_weight(model.weight), halves)


def cast(recipe):
    torch.manual_seed(0)
    return torch_bf16.cast_model(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)), recipe)


def test_many_short_trainings_move_as_far_as_a_long_one(recipe):
    model, once = cast(recipe), cast(recipe)
    long = make(once, recipe)
    optimizer = None
    for number in range(20):
        optimizer = make(model, recipe)  # the old one lives until then
        step(optimizer, number)
        step(long, number)
    for one, other in zip(exact(model, optimizer), exact(once, long), strict=True):
        assert torch.equal(one, other)


def test_a_new_optimizer_starts_from_what_something_else_has_written(recipe):
    model = cast(recipe)
    first = make(model, recipe)
    step(first, 0)
    with torch.no_grad():
        model[0].weight.mul_(0.5)
        model[1].weight.data.mul_(0.5)
    second = make(model, recipe)
    for p in (model[0].weight, model[1].weight):
        assert torch.equal(second.exact_weight(p), p.float())
    assert torch.equal(second.exact_weight(model[0].bias), first.exact_weight(model[0].bias))


@pytest.mark.parametrize("written", [False, True])
def test_masters_that_were_loaded_are_inherited_without_a_step(recipe, written):
    """Also those of a program that writes weights, for which writes are looked for after a load."""
    trained = cast(recipe)
    first = make(trained, recipe)
    step(first, 0)
    if written:
        with torch.no_grad():
            trained[0].weight.mul_(0.5)
        step(first, 1)
    # A host loads the weights into an fp32 model, whose cast then leaves bits that are all zero.
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    model.load_state_dict(trained.state_dict())
    torch_bf16.cast_model(model, recipe)
    loaded = make(model, recipe)
    loaded.load_state_dict(copy.deepcopy(first.state_dict()))
    after = make(model, recipe)
    assert all(map(torch.equal, exact(model, after), exact(trained, first)))


def test_of_two_the_one_that_stepped_last_is_inherited_from(recipe):
    model = cast(recipe)
    first = make(model, recipe)
    step(first, 0)
    for p in model.parameters():
        p.data  # noqa: B018  (saves what tells writes number by number)
    second = make(model, recipe)
    step(second, 1)
    before = exact(model, second)
    assert all(map(torch.equal, exact(model, make(model, recipe)), before))


@pytest.mark.parametrize("loaded", [False, True], ids=["stepped", "loaded"])
def test_making_an_optimizer_looks_through_no_others(recipe, monkeypatch, loaded):
    parameters = [nn.Parameter(torch.ones(4).bfloat16()) for _ in range(200)]
    first = torch_bf16.AdamW(parameters, recipe=recipe)
    for each in parameters:
        each.grad = torch.ones_like(each)
    first.step()
    if loaded:
        first.load_state_dict(copy.deepcopy(first.state_dict()))
    hashed, original = [], torch.Tensor.__hash__
    monkeypatch.setattr(torch.Tensor, "__hash__", lambda t: hashed.append(t) or original(t))
    torch_bf16.AdamW(parameters[:1], recipe=recipe)
    assert 0 < len(hashed) < 100


def test_both_step_from_masters_of_their_own(recipe):
    model = cast(recipe)
    first = make(model, recipe)
    step(first, 0)
    second = make(model, recipe)
    before = exact(model, first)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    second.step()
    for p in model.parameters():
        one, other = first.state[p], second.state[p]
        key = "remainder16" if "remainder16" in one else "master"
        assert one[key].data_ptr() != other[key].data_ptr()
    assert all(map(torch.equal, exact(model, second), before))


def test_optimizers_without_masters_and_those_that_are_gone_leave_nothing(recipe):
    model = cast(recipe)
    step(make(model, recipe), 0)
    gc.collect()
    second = make(model, recipe)
    assert all(map(torch.equal, exact(model, second), [p.float() for p in model.parameters()]))
    step(second, 1)
    rounded = torch_bf16.get_recipe("bf16-stochastic", vectors="like_matrices")
    step(torch_bf16.SGD(model.parameters(), lr=1e-6, recipe=rounded), 2)


def test_masters_that_were_loaded_are_gone_on_from_before_any_step(recipe):
    model, other = cast(recipe), cast(recipe)
    trained = make(model, recipe)
    step(trained, 0)
    loaded = make(other, recipe)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(trained.state_dict())
    second = make(other, recipe)
    assert all(map(torch.equal, exact(other, second), exact(model, trained)))


def test_weights_that_were_loaded_after_masters_count(recipe):
    model, other = cast(recipe), cast(recipe)
    trained = make(model, recipe)
    step(trained, 0)
    loaded = make(other, recipe)
    loaded.load_state_dict(trained.state_dict())
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    second = make(other, recipe)
    assert all(map(torch.equal, exact(other, second), [p.float() for p in other.parameters()]))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies_pass_masters_on(recipe, copied):
    model = cast(recipe)
    optimizer = make(model, recipe)
    step(optimizer, 0)
    model, optimizer = copied((model, optimizer))
    second = make(model, recipe)
    assert all(map(torch.equal, exact(model, second), exact(model, optimizer)))


def test_masters_are_asked_of_none_but_their_optimizers(recipe, monkeypatch):
    model = cast(recipe)
    first = [torch_bf16.SGD([p], recipe=recipe, backend="eager") for p in model.parameters()]
    for each in first[:2]:
        step(each, 0)
    calls = []
    remember = remainders.remember_planes
    monkeypatch.setattr(
        remainders, "remember_planes", lambda *a: (calls.append(len(a[0])), remember(*a))
    )
    second = [torch_bf16.SGD([p], recipe=recipe, backend="eager") for p in model.parameters()]
    assert calls == [1, 1]
    make(model, recipe)
    # What the new ones inherited waits for the next one, too.
    assert calls == [1, 1]
    assert len(second) == len(first) == 4


def replace(optimizer):
    optimizer.state = defaultdict(dict)


def replace_each(optimizer):
    for p in optimizer.state:
        optimizer.state[p] = {"mine": 1}


def pop_each(optimizer):
    for p in [*optimizer.state]:
        optimizer.state.pop(p)


def load_none(optimizer):
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


def clear_each(optimizer):
    for state in optimizer.state.values():
        state.clear()


def clear(optimizer):
    optimizer.state.clear()


RESETS = [clear, clear_each, replace, replace_each, pop_each, load_none]


@pytest.mark.parametrize("reset", RESETS)
def test_masters_outlive_states_that_are_reset(reset, recipe):
    model = cast(recipe)
    optimizer = make(model, recipe)
    step(optimizer, 0)
    before = exact(model, optimizer)
    reset(optimizer)
    assert all(map(torch.equal, exact(model, optimizer), before))
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    model[0].bias.grad = model[1].weight.grad = model[1].bias.grad = None
    for _ in range(2):
        optimizer.step()
        assert all(map(torch.equal, exact(model, optimizer), before))


@pytest.mark.filterwarnings("ignore:.*written through p.data")
def test_weights_that_were_written_around_a_reset_count(recipe):
    model = cast(recipe)
    optimizer = make(model, recipe)
    step(optimizer, 0)
    with torch.no_grad():
        model[0].weight.mul_(0.5)
        model[1].weight.data.mul_(0.5)
        optimizer.state.clear()
        model[0].bias.add_(1.0)
        model[1].bias.data.add_(1.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(map(torch.equal, exact(model, optimizer), [p.float() for p in model.parameters()]))


def test_the_bits_of_a_cast_outlast_a_broadcast_of_the_same_numbers(recipe):
    """DDP writes the weights before ``sync_masters`` asks for the bits that the cast dropped."""
    another, model = cast(recipe), cast(recipe)
    first = make(another, recipe)
    exact_before = exact(model, make(model, recipe))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.clone())
    make(model, recipe)
    for p, expected in zip(model.parameters(), exact_before, strict=True):
        bits = remainders.find_remainder(shard_of(p)).bits
        lower = expected if bits.dtype == torch.float32 else split16(expected)[1]
        assert torch.equal(bits, lower)
    assert first.param_groups


def test_an_optimizer_whose_conversion_was_refused_passes_nothing_on(recipe):
    model = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    refused = torch.optim.AdamW(model.parameters())
    step(refused, 0)
    refused.state[model[0].weight]["exp_avg"] = torch.zeros(3)
    with pytest.raises(torch_bf16.StateMismatchError):
        torch_bf16.convert(refused, recipe)
    step(make(model, recipe), 1)


def test_a_master_that_was_set_before_any_step_is_passed_on(recipe):
    model = cast(recipe)
    first = make(model, recipe)
    value = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    first.set_exact_weight(model[0].weight, value)
    assert torch.equal(make(model, recipe).exact_weight(model[0].weight), value)


def test_a_new_optimizer_does_not_look_through_others_that_have_no_masters(recipe, monkeypatch):
    """One for each of thousands of parameters would look at millions."""
    monkeypatch.setattr(engine, "_engines", LivingSet())
    looked = []
    waiting = inherited_masters._waiting
    monkeypatch.setattr(
        inherited_masters, "_waiting", lambda *given: looked.append(1) or waiting(*given)
    )
    kept = [make(nn.Linear(4, 4).bfloat16(), recipe) for _ in range(3)]
    assert not looked
    step(kept[0], 0)
    kept.append(make(nn.Linear(4, 4).bfloat16(), recipe))
    assert looked
