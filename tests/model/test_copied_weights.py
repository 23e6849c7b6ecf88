"""Deep copies of bf16 weights are known by the weight that they come from in the end."""

from __future__ import annotations

import copy
import gc

import pytest
from test_blended_weights import mul_add, prepared, train
from torch import nn

import torch_bf16
from torch_bf16.model import copied_weights
from torch_bf16.model.copied_weights import (
    forget_sources,
    leave_copies,
    source_of,
    watched_copies,
)


@pytest.fixture
def weight():
    return torch_bf16.cast_model(nn.Linear(32, 32)).weight


def is_watched(weight):
    return any(each is weight for each, _ in watched_copies())


def test_a_copy_of_a_copy_comes_from_the_first_weight(weight):
    first = copy.deepcopy(weight)
    assert source_of(weight) is None
    assert source_of(first) == source_of(copy.deepcopy(first)) == id(weight)


def test_a_copy_that_is_left_alone_is_still_a_copy(weight):
    first, second = copy.deepcopy(weight), copy.deepcopy(weight)
    leave_copies([first, weight])
    assert (is_watched(first), is_watched(second)) == (False, True)
    leave_copies()
    assert (is_watched(first), is_watched(second)) == (False, False)
    assert source_of(first) == id(weight)


def test_a_copy_whose_weight_is_gone_does_not_follow_a_new_one_in_its_place(weight):
    number, average = id(weight), copy.deepcopy(weight)
    model = nn.Linear(32, 32)
    assert source_of(average) == number
    forget_sources({id(each) for each in model.parameters()})
    assert source_of(average) == number
    forget_sources({number})
    assert source_of(average) is None


def test_nothing_is_kept_alive(weight):
    before = len(watched_copies())
    average = copy.deepcopy(weight)
    assert len(watched_copies()) == before + 1
    del average
    gc.collect()
    assert len(watched_copies()) == before


def test_a_signal_handler_may_copy_weights_while_one_is_copied(weight, monkeypatch):
    inner, known = [], copied_weights._Copy

    def interrupted(source):
        monkeypatch.undo()
        inner.append(copy.deepcopy(weight))
        return known(source)

    monkeypatch.setattr(copied_weights, "_Copy", interrupted)
    outer = copy.deepcopy(weight)
    assert source_of(outer) == source_of(inner[0]) == id(weight)


def test_a_copy_of_a_copy_that_is_blended_is_named():
    """As where a target is made from an average that was copied before."""
    model, optimizer = prepared(nn.Linear(32, 32))
    average = copy.deepcopy(copy.deepcopy(model))
    with pytest.warns(UserWarning, match="a copy of 'weight' is bfloat16"):
        train(model, optimizer, model, average, mul_add)


def test_a_copy_is_named_though_its_model_is_cast_again_within_another():
    """As where a head is put on an encoder whose target exists."""
    model, optimizer = prepared(nn.Linear(32, 32))
    average = copy.deepcopy(model)
    torch_bf16.cast_model(nn.Sequential(model, nn.Linear(32, 4)))
    with pytest.warns(UserWarning, match="a copy of '0.weight' is bfloat16"):
        train(model, optimizer, model, average, mul_add)
