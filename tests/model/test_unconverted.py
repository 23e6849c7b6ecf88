"""Optimizers that step weights of ours without knowing it are warned about."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import torch_bf16
from torch_bf16 import errors, plugin_api
from torch_bf16.model.unconverted import _watched


@pytest.fixture
def cast():
    """A model that was cast, and is watched until the test ends."""
    model = torch_bf16.cast_model(torch.nn.Linear(3, 3))
    handle = plugin_api.warn_unconverted(model, "Do this instead")
    yield model
    handle.remove()


def step(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def step_each(optimizers):
    for each in optimizers:
        step(each)


def test_one_that_was_not_converted_is_named_once(cast):
    optimizer = torch.optim.SGD(cast.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="SGD steps over bfloat16 weights of Linear.*Do this inst"):
        step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(optimizer)


def test_a_scheduler_does_not_hide_it(cast):
    """It wraps ``step()``, in a module whose warnings Accelerate silences."""
    optimizer = torch.optim.SGD(cast.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.warns(UserWarning, match="was not converted") as caught:
        step(optimizer)
    assert {each.filename for each in caught} == {__file__}
    assert scheduler.last_epoch == 0


def test_a_model_that_was_only_cast_is_watched():
    """Code that makes its optimizer itself, after the cast, would lose updates in silence."""
    model = torch_bf16.cast_model(torch.nn.Linear(3, 3))
    with pytest.warns(UserWarning, match="Call torch_bf16.prepare") as caught:
        step(torch.optim.AdamW(model.parameters()))
    assert len(caught) == 1


def test_lbfgs_is_told_what_works(cast):
    """``prepare`` refuses it, so that the general advice would lead nowhere."""
    optimizer = torch_bf16.AdamW(cast.parameters(), lr=0.1)
    step(optimizer)
    second = torch.optim.LBFGS(cast.parameters(), max_iter=1)
    with pytest.warns(
        UserWarning, match="LBFGS steps .* LBFGS cannot be converted.*fp32_state_dict"
    ):
        second.step(lambda: closure(cast))
    exact = torch_bf16.fp32_state_dict(cast, optimizer)
    cast.float().load_state_dict(exact)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = closure(cast)
        torch.optim.LBFGS(cast.parameters()).step(lambda: closure(cast))
    assert closure(cast) < before


def closure(model):
    model.zero_grad()
    (loss := model(torch.ones(2, 3, dtype=model.weight.dtype)).square().mean()).backward()
    return loss


def test_an_optimizer_of_a_part_is_named_once_beside_the_model_around_it():
    part = torch_bf16.cast_model(torch.nn.Linear(3, 3))
    whole = torch.nn.Sequential(part, torch.nn.Linear(3, 3))
    torch_bf16.cast_model(whole)
    with pytest.warns(UserWarning, match="was not converted") as caught:
        step(torch.optim.SGD(whole.parameters(), lr=0.1))
    assert len(caught) == 1


class Wrapper(torch.optim.Optimizer):
    """Around an optimizer that was converted."""

    def __init__(self, base):
        super().__init__(base.param_groups[0]["params"], {})
        self.base = base

    def step(self, closure=None):
        self.base.step()


def test_nothing_is_said_of_others(cast):
    converted = torch_bf16.convert(torch.optim.SGD(cast.parameters(), lr=0.1))
    others = torch.optim.SGD(torch.nn.Linear(3, 3).bfloat16().parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for optimizer in (converted, Wrapper(converted), others):
            step(optimizer)


def test_a_model_that_is_gone_is_watched_no_longer():
    # Among them are other tests' models: what is gone by now goes with the next one.
    before = {*_watched}
    model = torch_bf16.cast_model(torch.nn.Linear(3, 3))
    plugin_api.warn_unconverted(model, "")  # in place of the cast's own
    (ours,) = _watched.keys() - before
    del model
    gc.collect()
    step(torch.optim.SGD(torch.nn.Linear(3, 3).parameters(), lr=0.1))
    handle = plugin_api.warn_unconverted(torch_bf16.cast_model(torch.nn.Linear(3, 3)), "")
    handle.remove()
    assert ours not in _watched
    assert _watched.keys() <= before


def test_a_model_may_be_cast_while_another_thread_steps(cast):
    """torch iterates over hooks on all optimizers, one of which may give way to that thread."""

    def cast_another(*_):
        torch_bf16.cast_model(nn.Linear(3, 3))

    with register_optimizer_step_pre_hook(cast_another):
        step(torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1))


def test_one_of_a_copy_is_named_once_however_many_there_are(cast, monkeypatch):
    """The outer model of DiLoCo, a client's or an inner loop's, is often a ``deepcopy``."""
    monkeypatch.setattr(errors, "_said", set())
    match = "SGD steps over bfloat16 weights of a copy of a cast Linear .* model=copy.*float"
    copies = [copy.deepcopy(cast), copy.deepcopy(copy.deepcopy(cast))]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in copies]
    with pytest.warns(UserWarning, match=match) as caught:
        step_each(optimizers)
    assert len(caught) == 1


def test_a_copy_is_named_too_after_the_model_is_watched_again(cast, monkeypatch):
    monkeypatch.setattr(errors, "_said", set())
    copied = copy.deepcopy(cast)
    plugin_api.warn_unconverted(cast, "Do this.")
    with pytest.warns(UserWarning, match="weights of a copy of a cast Linear"):
        step(torch.optim.SGD(copied.parameters(), lr=0.1))


def test_nothing_is_said_of_copies_that_are_converted_or_fp32(cast, monkeypatch):
    monkeypatch.setattr(errors, "_said", set())
    converted = torch.optim.SGD(copy.deepcopy(cast).parameters(), lr=0.1)
    step(torch_bf16.convert(converted))
    step(torch.optim.SGD(copy.deepcopy(cast).float().parameters(), lr=0.1))
    # Copies of models that were never cast, some of whose weights have the ids of a cast one then.
    plain = torch.nn.Linear(3, 3).bfloat16()
    copies = [copy.deepcopy(plain), copy.deepcopy(plain)]
    for p in plain.parameters():
        p.data = p.data.float()
    torch_bf16.cast_model(plain)
    for each in copies:
        step(torch.optim.SGD(each.parameters(), lr=0.1))
