"""`step()` runs hooks and has its range in traces, as torch's own steps do."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import torch_bf16
from torch_bf16 import plugin_api

NAME = "Optimizer.step#AdamW.step"


@pytest.fixture
def optimizer():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    return torch_bf16.AdamW([weight], lr=0.5, backend="eager")


def names(events):
    return [event.name for event in events]


def test_a_trace_has_the_range_that_torch_opens(optimizer):
    optimizer.step()
    with torch.profiler.profile(acc_events=True) as profile:
        optimizer.step()
    assert names(profile.events()).count(NAME) == 1
    optimizer.step()


def test_nothing_is_recorded_where_nothing_is_profiled(optimizer, monkeypatch):
    def fail(name, *_):
        raise AssertionError(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", fail)
    optimizer.step()
    with torch.profiler.profile(acc_events=True), pytest.raises(AssertionError, match=NAME):
        optimizer.step()


def test_the_hosts_warning_of_other_optimizers_costs_ours_nothing(optimizer, monkeypatch):
    def fail(name, *_):
        raise AssertionError(name)

    model = torch_bf16.cast_model(nn.Linear(2, 2))
    handle = plugin_api.warn_unconverted(model, "Convert it.")
    monkeypatch.setattr(torch.autograd.profiler, "record_function", fail)
    try:
        optimizer.step()
        other = torch_optimizer.register_optimizer_step_pre_hook(lambda *_: None)
        with other, pytest.raises(AssertionError, match=NAME):
            optimizer.step()
    finally:
        handle.remove()


def test_a_torch_without_the_flag_records_always(optimizer, monkeypatch):
    monkeypatch.delattr(torch.autograd.profiler, "_is_profiler_enabled")
    entered = []
    record = torch.autograd.profiler.record_function
    monkeypatch.setattr(
        torch.autograd.profiler,
        "record_function",
        lambda name: entered.append(name) or record(name),
    )
    optimizer.step()
    assert entered == [NAME]


@pytest.mark.parametrize(
    ("register", "when"),
    [
        (lambda _, hook: torch_optimizer.register_optimizer_step_pre_hook(hook), "before"),
        (lambda _, hook: torch_optimizer.register_optimizer_step_post_hook(hook), "after"),
        (lambda optimizer, hook: optimizer.register_step_pre_hook(hook), "before"),
        (lambda optimizer, hook: optimizer.register_step_post_hook(hook), "after"),
    ],
    ids=["all, before", "all, after", "one, before", "one, after"],
)
def test_hooks_run(optimizer, register, when):
    (weight,) = optimizer.param_groups[0]["params"]
    before, seen = weight.detach().clone(), []
    hook = register(optimizer, lambda *_: seen.append(torch.equal(weight, before)))
    optimizer.step()
    assert seen == [when == "before"]
    hook.remove()
    optimizer.step()
    assert len(seen) == 1


def test_hooks_that_a_closure_adds_run_after_the_step(optimizer):
    seen = []
    optimizer.step(lambda: optimizer.register_step_post_hook(lambda *_: seen.append(1)))
    assert seen == [1]


def test_compiled_loops_run_hooks_that_come_later(optimizer):
    seen, train = [], torch.compile(lambda: optimizer.step(), backend="eager")
    train()
    before = optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    train()
    before.remove()
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train()
    assert seen == ["before", "after"]
    with torch.profiler.profile(acc_events=True) as profile:
        train()
    assert names(profile.events()).count(NAME) == 1


def test_a_hook_may_replace_the_arguments(optimizer):
    optimizer.register_step_pre_hook(lambda owner, args, kwargs: ((owner, lambda: 7), {}))
    assert optimizer.step() == 7


def test_subclasses_and_their_own_steps_are_wrapped_once(optimizer):
    class Inheriting(torch_bf16.AdamW):
        pass

    class Overriding(torch_bf16.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    for kind in (Inheriting, Overriding):
        seen, made = [], kind(optimizer.param_groups[0]["params"], backend="eager")
        made.register_step_post_hook(lambda *_, seen=seen: seen.append(1))
        made.step()
        assert len(seen) == 1


def test_classes_are_not_kept_and_may_get_another_step(optimizer):
    class Changing(torch_bf16.AdamW):
        pass

    seen, made = [], Changing(optimizer.param_groups[0]["params"], backend="eager")
    made.register_step_post_hook(lambda *_: seen.append(1))
    made.step()

    def step(self, closure=None):
        return super(type(self), self).step(closure)

    Changing.step = torch.optim.Optimizer.profile_hook_step(step)
    Changing.step.hooked = True
    made.step()
    assert len(seen) == 2
    kind = weakref.ref(Changing)
    del Changing, made
    gc.collect()
    assert kind() is None
