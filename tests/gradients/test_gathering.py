"""Gradients that wait for each other: what is taken when, and what nobody may notice of it."""

from __future__ import annotations

import copy
import gc
import threading
import types
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import torch_bf16
from torch_bf16.engine.batch import Batch
from torch_bf16.gradients import gathering, stochastic_sums

SUMMED = torch_bf16.get_recipe("bf16-stochastic", accumulate="bf16_stochastic")


def network(width=16, depth=6):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))).bfloat16()


def optimizer_of(model, recipe=SUMMED, cls=torch_bf16.AdamW):
    return cls(model.named_parameters(), lr=0.01, recipe=recipe)


def backward(model, seed, frozen=()):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
    for number, layer in enumerate(model):
        x = layer(x) if number not in frozen else x
    x.float().square().mean().backward()


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(one, other):
    return all(
        a is None and b is None if a is None or b is None else torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture
def calls(monkeypatch):
    """The number of gradients in each kernel call so far."""
    found, run = [], Batch.run

    def counted(self, taken, *rest, **named):
        found.append(sum(each is not None for each in taken))
        return run(self, taken, *rest, **named)

    monkeypatch.setattr(Batch, "run", counted)
    return found


@pytest.mark.parametrize("limit", [1, 600, 1 << 20])
def test_sums_do_not_depend_on_what_waits_for_what(monkeypatch, calls, limit):
    monkeypatch.setattr(gathering, "LIMIT", limit)
    model = network()
    optimizer, twin = optimizer_of(model), copy.deepcopy(model)
    other = optimizer_of(twin)
    # A hook that looks at each sum lets none of them wait.
    for parameter in twin.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: None)
    for step in range(3):
        for number in range(4):
            # The layers that take part are others in each pass.
            frozen = (number % 3, 5) if step else ()
            backward(model, 10 * step + number, frozen)
            taken, calls[:] = list(calls), []
            backward(twin, 10 * step + number, frozen)
            assert set(calls) <= {1}
            assert sum(taken) == sum(calls)
            if number:
                assert len(taken) == {1: len(calls), 1 << 20: 1}.get(limit, len(taken))
            calls.clear()
            assert same(gradients(model), gradients(twin))
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        calls.clear()
    assert same([*model.parameters()], [*twin.parameters()])


def test_what_is_made_for_sums_serves_the_next_steps(monkeypatch):
    made = []
    init = Batch.__init__
    monkeypatch.setattr(Batch, "__init__", lambda self, *a: (made.append(1), init(self, *a))[1])
    model = network()
    optimizer = optimizer_of(model)
    for step in range(3):
        for number in range(3):
            backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
        if not step:
            made.clear()
    assert not made


def test_sums_are_freed_with_zero_grad():
    model = network()
    optimizer = optimizer_of(model)
    for number in range(3):
        backward(model, number)
    optimizer.step()
    storages = [weakref.ref(p.grad.untyped_storage()) for p in model.parameters()]
    optimizer.zero_grad()
    gc.collect()
    assert not any(each() for each in storages)


def test_a_hook_on_a_parameter_sees_its_sum():
    model, seen = network(), []
    _optimizer = optimizer_of(model)
    weight = model[2].weight
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for number in range(3):
        backward(model, number)
        assert torch.equal(seen[-1], weight.grad)


def test_a_hook_on_the_node_that_accumulates_sees_the_sum():
    """As data parallelism written by hand has it."""
    model, seen = network(), []
    _optimizer = optimizer_of(model)
    weight = model[2].weight
    node = get_gradient_edge(weight).node
    node.register_hook(lambda *_: seen.append(weight.grad.clone()))
    for number in range(3):
        backward(model, number)
        assert torch.equal(seen[-1], weight.grad)


def test_nodes_are_searched_for_hooks_once(monkeypatch):
    searched = []
    monkeypatch.setattr(stochastic_sums, "has_node_hooks", lambda p: searched.append(id(p)))
    model = network()
    optimizer = optimizer_of(model)
    for _ in range(2):
        for number in range(4):
            backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
        assert sorted(searched) == sorted(map(id, model.parameters()))


def test_a_backward_pass_that_fails_leaves_the_sums_from_before():
    model = network()
    optimizer = optimizer_of(model)
    for number in range(2):
        backward(model, number)
    before = gradients(model)

    def fail(gradient):
        raise ZeroDivisionError

    hook = model[0].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        backward(model, 2)
    hook.remove()
    assert same(gradients(model), before)
    accumulation = optimizer._engine.accumulation
    assert not list(accumulation._passes)
    optimizer.zero_grad()
    backward(model, 3)
    backward(model, 4)
    twin = network()
    its = optimizer_of(twin)
    backward(twin, 3)
    backward(twin, 4)
    assert same(gradients(model), gradients(twin))
    assert its is not None


def test_passes_within_a_pass_add_in_the_order_in_which_gradients_come():
    """Reentrant checkpoints run backward passes of their own; the layer is in several of them."""
    sums = []
    for hooked in (False, True):
        layer = network(depth=1)[0]
        _optimizer = torch_bf16.SGD(layer.named_parameters(), lr=0.1, recipe=SUMMED)
        if hooked:
            for parameter in layer.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: None)
        torch.manual_seed(1)
        for _ in range(3):
            x = torch.randn(4, 16).bfloat16().requires_grad_()
            for _ in range(3):
                x = checkpoint(layer, x, use_reentrant=True)
            layer(x).float().square().mean().backward()
        sums.append([p.grad for p in layer.parameters()])
    assert same(*sums)


def test_two_threads_sum_side_by_side():
    model = nn.ModuleList(network() for _ in range(2))
    _optimizer = optimizer_of(model)
    alone = nn.ModuleList(network() for _ in range(2))
    _other = optimizer_of(alone)

    def run(part):
        for seed in range(20):
            backward(part, seed)

    threads = [threading.Thread(target=run, args=(part,)) for part in model]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for part in alone:
        run(part)
    assert same(gradients(model), gradients(alone))


def test_released_steps_share_a_kernel_call(calls):
    plain, released = (network() for _ in range(2))
    ordinary, optimizer = (optimizer_of(m, "bf16-stochastic") for m in (plain, released))
    torch_bf16.release_gradients(released, optimizer)
    for step in range(4):
        # A layer that takes no part in some of the steps.
        frozen = (2,) if step % 2 else ()
        backward(plain, step, frozen)
        ordinary.step()
        ordinary.zero_grad()
        calls.clear()
        backward(released, step, frozen)
        # Matrices and vectors have formats of their own.
        assert len(calls) == 2
        assert sum(calls) == 12 - 2 * len(frozen)
        assert all(p.grad is None for p in released.parameters())
        optimizer.step()
    assert same([*plain.parameters()], [*released.parameters()])


def test_a_backward_pass_that_fails_takes_no_step_that_waited():
    model = network()
    optimizer = optimizer_of(model, "bf16-stochastic")
    torch_bf16.release_gradients(model, optimizer)
    backward(model, 0)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    hook = model[0].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model, 1)
    hook.remove()
    assert same(before, [p.detach() for p in model.parameters()])
    optimizer.zero_grad()
    backward(model, 2)
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


def test_what_came_on_several_streams_waits_to_the_end(monkeypatch):
    """Mid-pass a kernel call would not wait for the others; the end of the pass does."""
    monkeypatch.setattr(gathering, "LIMIT", 10)
    streams, taken = iter("aaa" + "aba"), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: next(streams))
    parameters, arrived = [nn.Parameter(torch.zeros(1)) for _ in range(3)], []
    gradient = types.SimpleNamespace(device=torch.device("cuda"), nbytes=5)
    gathered = gathering.Gathering(lambda group, said: taken.append((len(arrived), list(said))))
    for _ in range(2):
        waiting = gathering.Waiting()
        for parameter in parameters:
            gathered.add(waiting, parameter, gradient, None, "kind")  # pyright: ignore
            arrived.append(parameter)
        gathered.finish(waiting)
    # On one stream two are taken when the second has come, on two with the third, at the end.
    assert taken == [(1, [0, 1]), (3, [0]), (6, [0, 1]), (6, [0])]
