"""States in host memory: the bits of states on the device, in all that an optimizer can do.

On a CPU both are the same memory, so a :class:`slow_bus.SlowBus` stands between them, whose copies
come as late as they may.
"""

import copy

import pytest
import torch
from offloaded import BYTES, backward, contents, network, offloaded, plain_steps, same
from optimizer_cases import (
    BACKENDS,
    RECIPES,
    assert_same,
    every_case,
    make_optimizer,
    make_parameters,
    parameters_of,
    snapshot,
    take_steps,
)
from slow_bus import ORDERS, use
from torch import nn

import torch_bf16
from torch_bf16 import Recipe


@pytest.fixture
def link(monkeypatch):
    return use(monkeypatch, ORDERS[1])


def pair(name="adamw", recipe="stochastic", backend="eager", **options):
    """The same optimizer with states on the device, and on the host."""
    return [
        make_optimizer(name, each, backend, make_parameters().items(), **options)
        for each in (recipe, offloaded(recipe))
    ]


def assert_on_host(optimizer, link):
    for p in parameters_of(optimizer):
        for key, each in optimizer.state[p].items():
            assert key == "step" or not each.numel() or link.holds(each), key


@every_case
def test_every_optimizer_has_the_same_bits(link, name, recipe, backend):
    here, there = pair(name, recipe, backend)
    for each in (here, there):
        take_steps(each, range(3))
    assert_same(snapshot(there), snapshot(here))
    assert_on_host(there, link)
    assert "down" in link.log or all(len(each) < 2 for each in there.state.values())


def interpreted_steps(name, recipe):
    with pytest.MonkeyPatch.context() as patch:
        link = use(patch, ORDERS[1])
        here, there = pair(name, recipe, "triton")
        for each in (here, there):
            take_steps(each, range(2))
        assert_same(snapshot(there), snapshot(here))
        assert_on_host(there, link)


# What is copied, and when, depends on the formats, and on the rule only through its states.
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_triton_has_the_same_bits(interpreted, name, recipe):
    interpreted(interpreted_steps, name, recipe)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
@pytest.mark.parametrize("recipe", ["stochastic", "master"])
def test_what_looks_at_whole_tensors_has_the_same_bits(link, name, recipe, backend):
    found = []
    for each in (RECIPES[recipe], offloaded(recipe)):
        generator = torch.Generator().manual_seed(0)
        shapes = [(40, 24), (24, 40), (2, 16, 16)] + ([(4000,)] if name == "Adafactor" else [])
        weights = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
        named = [(f"p{n}", nn.Parameter(x)) for n, x in enumerate(weights)]
        optimizer = getattr(torch_bf16, name)(named, lr=0.01, recipe=each, backend=backend)
        take_steps(optimizer, range(3))
        found.append(snapshot(optimizer))
    assert_same(*found)
    assert "down" in link.log or (name, recipe) == ("Adafactor", "stochastic")


@pytest.mark.parametrize("recipe", ["stochastic", "master"])
def test_schedule_free_modes_switch(link, recipe):
    here, there = pair("schedule_free_adamw", recipe)
    for each in (here, there):
        take_steps(each, range(3))
        each.eval()
    assert_same(snapshot(there), snapshot(here))
    assert_on_host(there, link)
    saved = copy.deepcopy(there.state_dict())
    here.train()
    there.load_state_dict(saved)
    there.train()
    for each in (here, there):
        take_steps(each, range(3, 5))
    assert_same(snapshot(there), snapshot(here))


def test_small_parameters_stay_where_they_are(monkeypatch):
    bus = use(monkeypatch)
    monkeypatch.setattr("torch_bf16.states.home.SMALLEST", 128 * 64)
    model, optimizer = network(offloaded(BYTES))
    plain_steps(model, optimizer)
    for p in model.parameters():
        kept = [x for key, x in optimizer.state[p].items() if key != "step"]
        assert all(bus.holds(each) == (p.ndim == 2) for each in kept)


def test_where_parameters_are_in_host_memory_there_is_nothing_to_do():
    found = []
    for recipe in (BYTES, offloaded(BYTES)):
        model, optimizer = network(recipe, backend=None)
        plain_steps(model, optimizer)
        found.append(contents(model, optimizer))
    assert same(*found)


def test_a_cuda_graph_of_it_is_refused(link):
    model, optimizer = network(offloaded(BYTES))
    plain_steps(model, optimizer)
    backward(model, 3)
    why = optimizer._engine.plan.obstacle_to_capture()
    assert "states are in host memory" in why
    assert "leave offload='states' out" in why


class Foreign(torch.optim.Optimizer):
    """Of no fused rule."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(ValueError, match=r"offload='cpu' does not say .* use one of none, states"):
        Recipe(offload="cpu")
    model = nn.Linear(8, 8)
    for way in (torch_bf16.convert, lambda o, r, model: torch_bf16.prepare(model, o, r)):
        with pytest.raises(NotImplementedError, match=r"offload='states' .* fused rule"):
            way(Foreign(model.parameters()), offloaded(BYTES), model=model)
        assert model.weight.dtype == torch.float32
