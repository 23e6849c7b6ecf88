"""What is left of a run whose gradients were summed or released: nothing."""

import gc
import weakref

import pytest
import torch
from torch import nn

import torch_bf16

WAYS = {
    "recipe": ({"accumulate": "bf16_stochastic"}, None),
    "bf16": ({}, lambda *run: torch_bf16.accumulate_gradients(*run, "bf16_stochastic")),
    "fp32": ({}, lambda *run: torch_bf16.accumulate_gradients(*run, "fp32")),
    "released": ({}, torch_bf16.release_gradients),
    "clipped": ({}, lambda *run: torch_bf16.release_gradients(*run, max_norm=1.0)),
}


def start(way, model=None):
    """A model, its optimizer and the handle, if there is any."""
    options, begin = WAYS[way]
    model = nn.Linear(4, 4) if model is None else model
    recipe = torch_bf16.get_recipe("bf16-fp32-master", **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = torch_bf16.prepare(model, optimizer, recipe)
    return model, optimizer, begin and begin(model, optimizer)


def train(model, optimizer):
    for passes in (2, 1):
        for _ in range(passes):
            model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
            if optimizer._engine.release:
                optimizer.step()
        optimizer.step()


def references(model, optimizer):
    engine = optimizer._engine
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    found = [model, *model.parameters(), optimizer, engine, engine.accumulation or engine.release]
    return [weakref.ref(each) for each in (*found, *moments)]


def alive(references):
    gc.collect()
    return [type(each()).__name__ for each in references if each() is not None]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_a_run_outlives_it(way):
    run = start(way)
    # As any LR scheduler, it refers to the optimizer, which refers to it.
    scheduler = torch.optim.lr_scheduler.LambdaLR(run[1], lambda _: 1.0)
    train(*run[:2])
    watched = references(*run[:2])
    del run, scheduler
    assert alive(watched) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_model_outlives_its_optimizer_without_hooks(way):
    model, optimizer, handle = start(way)
    train(model, optimizer)
    watched = references(model, optimizer)
    del optimizer, handle
    assert alive(watched) == ["Linear", "Parameter", "Parameter"]
    for each in model.parameters():
        assert not each._post_accumulate_grad_hooks
        assert not each._backward_hooks
    assert not model._forward_pre_hooks
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert {each.grad.dtype for each in model.parameters()} == {torch.bfloat16}
    model.zero_grad()
    train(*start(way, model)[:2])


@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way][1]])
def test_a_handle_does_not_keep_the_states_of_a_run(way):
    model, optimizer, handle = start(way)
    train(model, optimizer)
    watched = references(model, optimizer)
    del optimizer
    assert alive(watched) == ["Linear", "Parameter", "Parameter", type(handle).__name__]
    # In bf16, the first gradient after it leaves its sum to torch.
    for _ in range(2):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    handle.remove()
    assert {each.grad.dtype for each in model.parameters()} == {torch.bfloat16}
    assert getattr(handle, "last_norm", None) is None


def test_an_optimizer_that_is_left_goes_on_with_a_shared_parameter():
    shared = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    tiny = torch.tensor(2.0**-10, dtype=torch.bfloat16)
    recipe = torch_bf16.Recipe(accumulate="bf16_stochastic")
    left, gone = (torch_bf16.SGD([shared], lr=0.5, recipe=recipe) for _ in range(2))
    del gone
    gc.collect()
    assert torch_bf16.gradients.hooked_parameters.summed[id(shared)].owner is (
        left._engine.accumulation
    )
    for gradient in [torch.ones_like(tiny), *[tiny] * 8]:
        (shared * gradient).sum().backward()
    # Some are rounded up, by a spacing of 2^-7.
    assert 0 < shared.grad.ne(1).sum() < shared.numel()
