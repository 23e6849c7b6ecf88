"""`optimizer.graphed()`: replays are the steps that `step()` would take, or are refused.

Steps run in Triton's interpreter, in a child process, and a recording of launches stands for the
CUDA graph; see `test_gpu_training.py` for the same on GPUs.
"""

import contextlib
import copy
import gc
from typing import Any
from unittest import mock

import pytest
import torch
from optimizer_cases import (
    assert_same,
    make_optimizer,
    make_parameters,
    parameters_of,
    set_gradients,
    snapshot,
    take_steps,
)
from torch import nn

import torch_bf16
from torch_bf16.backends import cuda_graphs
from torch_bf16.optim import graphed


@pytest.fixture
def recorded(interpreted):
    """``recorded(function, *arguments)``: a call where recordings stand for CUDA graphs."""
    pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")
    return lambda function, *arguments: interpreted(_with_recordings, function, *arguments)


def _with_recordings(function, *arguments):
    from recorded_graphs import record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "record", record)
        function(*arguments)


def pair(recipe="stochastic", kind="adamw", **options):
    for _ in range(2):
        mine = make_parameters()
        optimizer = make_optimizer(kind, recipe, "triton", mine.items(), **options)
        set_gradients(parameters_of(optimizer), 0)
        yield optimizer


def write_gradients(optimizer, seed):
    """New numbers in the same memory, as `zero_grad(set_to_none=False)` and backward leave them."""
    held = [p.grad for p in parameters_of(optimizer)]
    set_gradients(parameters_of(optimizer), seed)
    for p, gradient in zip(parameters_of(optimizer), held, strict=True):
        p.grad = gradient.copy_(p.grad)


def replays_are_steps(recipe, first, kind="adamw", check_every=1):
    ours, plain = pair(recipe, kind)
    if first:
        ours.step()
        plain.step()
    before = [p.detach().clone() for p in parameters_of(ours)]
    step = ours.graphed(check_every=check_every)
    assert all(map(torch.equal, before, parameters_of(ours)))
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (ours, plain)]
    for seed in range(1, 6):
        for optimizer, take in ((ours, step), (plain, plain.step)):
            write_gradients(optimizer, seed)
            optimizer.scale_next_step(0.5 if seed % 2 else torch.tensor(0.25))
            optimizer.skip_next_step_where(torch.tensor(float(seed == 4)))
            if seed == 3:
                with torch.no_grad():
                    parameters_of(optimizer)[0].mul_(1.5)
            take()
        for each in schedules:
            each.step()
        assert_same(snapshot(ours), snapshot(plain))
    assert ours.skipped_steps == plain.skipped_steps == 1
    weights = parameters_of(ours)
    assert all(torch.equal(*map(ours.exact_weight, (w, w))) for w in weights)


@pytest.mark.parametrize("kind", ["cautious", "stable"])
def test_replays_sum_what_their_rule_wants_to_know_first(recorded, kind):
    recorded(replays_are_steps, "stochastic", False, kind)


def test_fewer_looks_have_the_same_bits(recorded):
    # The write before the third replay drops a remainder, if it is seen.
    recorded(replays_are_steps, "master", True, "adamw", 2)


@pytest.mark.parametrize("recipe", ["stochastic", "master"])
@pytest.mark.parametrize("first", [False, True], ids=["at once", "after a step"])
def test_replays_have_the_bits_of_steps(recorded, recipe, first):
    recorded(replays_are_steps, recipe, first)


def schedule_free_replays(kind):
    ours, plain = pair("stochastic", kind)
    step = ours.graphed()
    for seed in range(1, 5):
        for optimizer, take in ((ours, step), (plain, plain.step)):
            write_gradients(optimizer, seed)
            take()
            if seed == 2:
                optimizer.eval()
                optimizer.train()
        assert_same(snapshot(ours), snapshot(plain))
    ours.eval()
    with pytest.raises(RuntimeError, match="eval"):
        step()


@pytest.mark.parametrize("kind", ["schedule_free_adamw", "schedule_free_sgd"])
def test_schedule_free_replays_count_as_steps_do(recorded, kind):
    recorded(schedule_free_replays, kind)


def ordinary_steps_go_between():
    ours, plain = pair("master")
    step = ours.graphed()
    for seed in range(1, 4):
        for optimizer, take in ((ours, step), (plain, plain.step)):
            write_gradients(optimizer, seed)
            take()
            held = [p.grad for p in parameters_of(optimizer)]
            take_steps(optimizer, [seed + 10])
            # Of one parameter alone, elsewhere.
            for p in parameters_of(optimizer)[1:]:
                p.grad = None
            optimizer.step()
            for p, gradient in zip(parameters_of(optimizer), held, strict=True):
                p.grad = gradient
        assert_same(snapshot(ours), snapshot(plain))
    saved, expected = ours.state_dict(), plain.state_dict()
    assert saved["state"].keys() == expected["state"].keys()
    for key, state in expected["state"].items():
        assert all(torch.equal(each, saved["state"][key][name]) for name, each in state.items())
    twin = copy.deepcopy(ours)
    assert_same(snapshot(twin), snapshot(plain))


def test_ordinary_steps_with_other_gradients_may_go_between(recorded):
    recorded(ordinary_steps_go_between)


def other_gradient(optimizer, weight):
    weight.grad = weight.grad.clone()


def no_gradient(optimizer, weight):
    optimizer.zero_grad()


def loaded(optimizer, weight):
    optimizer.load_state_dict(optimizer.state_dict())


def more_parameters(optimizer, weight):
    optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(3)))]})


def hooked(optimizer, weight):
    optimizer.register_step_post_hook(lambda *_: None)


def refused(change, message):
    ours, _ = pair()
    step = ours.graphed()
    step()
    change(ours, parameters_of(ours)[1])
    weights = [p.detach().clone() for p in parameters_of(ours)]
    with pytest.raises(RuntimeError, match=message):
        step()
    assert all(map(torch.equal, weights, parameters_of(ours)))
    assert {float(state["step"]) for state in ours.state.values()} == {1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_gradient, "'vector'.* has another gradient .*set_to_none=False.*Nothing was"),
        (no_gradient, "'matrix'.* has no gradient any more.*set_to_none=False"),
        (loaded, r"a state was loaded .*Call graphed\(\) again"),
        (more_parameters, r"parameters, names .* have changed .*Call graphed\(\) again"),
        (hooked, "hooks are registered on its step"),
    ],
)
def test_a_replay_that_would_be_no_step_is_refused(recorded, change, message):
    recorded(refused, change, message)


def written_exactly(first):
    """A look at everything that comes after weights were written for the optimizer passes."""
    ours, plain = pair("master")
    step = ours.graphed()
    for seed in range(3):
        for each in (ours, plain):
            if first or seed:
                for p in parameters_of(each):
                    each.set_exact_weight(p, each.exact_weight(p) * 0.9)
            write_gradients(each, seed)
        step() if seed < 2 else ours.step()
        plain.step()
        assert_same(snapshot(ours), snapshot(plain))
    step()


@pytest.mark.parametrize("first", [False, True], ids=["between replays", "before them"])
def test_weights_may_be_written_exactly(recorded, first):
    recorded(written_exactly, first)


def looks_between(change, message):
    """With `check_every=3` the first of three replays looks, and one after an ordinary step."""
    ours, _ = pair("master")
    step = ours.graphed(check_every=3)
    step()
    held = [p.grad for p in parameters_of(ours)]
    change(ours, parameters_of(ours)[1])
    step()
    step()
    with pytest.raises(RuntimeError, match=f"{message}.* Up to 2 replays before this one did not"):
        step()
    assert {float(state["step"]) for state in ours.state.values()} == {3.0}
    for p, gradient in zip(parameters_of(ours), held, strict=True):
        p.grad = gradient
    step()
    change(ours, parameters_of(ours)[1])
    take_steps(ours, [9])
    for p in parameters_of(ours)[1:]:
        p.grad = None
    ours.step()
    with pytest.raises(RuntimeError, match="has another gradient"):
        step()


@pytest.mark.parametrize(
    ("change", "message"),
    [(other_gradient, "has another gradient"), (no_gradient, "has no gradient any more")],
)
def test_fewer_looks_refuse_later(recorded, change, message):
    recorded(looks_between, change, message)


def unlooked(change, message):
    ours, _ = pair()
    step = ours.graphed(check_every=1000)
    step()
    change(ours, parameters_of(ours)[1])
    with pytest.raises(RuntimeError, match=message):
        step()
    assert {float(state["step"]) for state in ours.state.values()} == {1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [(loaded, "a state was loaded"), (more_parameters, "parameters, names or the recipe")],
)
def test_fewer_looks_still_refuse_another_optimizer(recorded, change, message):
    recorded(unlooked, change, message)


@pytest.mark.parametrize("number", [0, -1, 1.5, "64", None, True])
def test_looks_need_a_number_of_replays(number):
    optimizer = torch_bf16.AdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match=f"check_every={number!r} must be an integer"):
        optimizer.graphed(check_every=number)


def re_pointed(kind):
    ours, _ = pair()
    step = ours.graphed()
    weight = parameters_of(ours)[0]
    step()
    each = {"weight": weight, "gradient": weight.grad, "state": ours.state[weight]["exp_avg"]}[kind]
    before = each.detach()
    each.data = each.data.clone()
    address = before.data_ptr()
    del before
    # Replays must not write what is somebody else's by now.
    other = torch.empty_like(each)
    assert other.data_ptr() != address
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphed, "_REPLAYS_PER_CHECK", 3)
        step()
        step()
        with pytest.raises(RuntimeError, match=r"was moved by \.data or replaced"):
            step()
    ours.graphed()()


@pytest.mark.parametrize("kind", ["weight", "gradient", "state"])
def test_what_was_put_elsewhere_is_seen_after_some_replays(recorded, kind):
    recorded(re_pointed, kind)


def outlives():
    ours, plain = pair()
    step, weights = ours.graphed(), parameters_of(ours)
    del ours
    gc.collect()
    step()
    plain.step()
    assert all(map(torch.equal, weights, parameters_of(plain)))


def test_the_callable_keeps_what_the_graph_reads(recorded):
    recorded(outlives)


def no_graph_holds(make, message):
    with pytest.raises(RuntimeError, match=message):
        make().graphed()


def strided_gradient():
    weight = nn.Parameter(torch.ones(8, 4, dtype=torch.bfloat16))
    weight.grad = torch.ones(4, 8, dtype=torch.bfloat16).t()
    return make_optimizer("adamw", "stochastic", "triton", [("w", weight)])


def no_gradients():
    weight = nn.Parameter(torch.ones(8, 4, dtype=torch.bfloat16))
    return make_optimizer("adamw", "stochastic", "triton", [("w", weight)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (strided_gradient, "a gradient lies in another order"),
        (no_gradients, "no parameter has a grad"),
    ],
)
def test_a_step_that_needs_copies_is_refused(recorded, make, message):
    recorded(no_graph_holds, make, message)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_a_backend_that_works_on_the_host_is_refused_and_told_what_works(backend):
    weight = nn.Parameter(torch.ones(8, 4, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = torch_bf16.AdamW([weight], backend=backend)
    with pytest.raises(RuntimeError, match=r"backend='triton'.*Nothing was updated"):
        optimizer.graphed()
    optimizer.step()
    assert float(optimizer.state[weight]["step"]) == 1.0


@pytest.mark.parametrize("steps", [0, 1])
def test_a_class_without_a_rule_is_refused(steps):
    weight = nn.Parameter(torch.ones(8, 4, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer: Any = torch_bf16.convert(torch.optim.Adamax([weight]), "bf16-stochastic")
    for _ in range(steps):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"Adamax is refused: it has no fused rule.*Nothing was"):
        optimizer.graphed()


def test_released_gradients_are_refused():
    model = torch_bf16.cast_model(nn.Linear(4, 4))
    optimizer = torch_bf16.AdamW(model.parameters(), backend="eager")
    torch_bf16.release_gradients(model, optimizer)
    with pytest.raises(RuntimeError, match="gradients are released"):
        optimizer.graphed()


def test_each_device_has_a_stream_of_its_own_captured(monkeypatch):
    """torch captures, unless told, on one stream of the device that was current first."""
    streams, within = [], contextlib.nullcontext()

    def graph(graph, stream=None, **_):
        streams.append(stream)
        return within

    monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.Mock)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "device", lambda device: within)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    for device in ("cuda:0", "cuda:1"):
        cuda_graphs.record(lambda: None, torch.device(device))
    assert streams == ["stream of cuda:0", "stream of cuda:1"]
