"""A model that was cast apart from the trained one that it follows, such as a reference model."""

from __future__ import annotations

import copy

import pytest
from test_blended_weights import STEPS, Siamese, mul_add, prepared, train
from torch import nn

import torch_bf16


@pytest.mark.parametrize("cast_first", [False, True])
def test_a_model_that_was_cast_apart_is_named_as_such_and_float_repairs_it(cast_first):
    """TRL's reference model: by its name, keep_fp32 would keep the trained model in fp32, too."""
    trained = nn.Sequential(nn.Linear(32, 32))
    reference = copy.deepcopy(trained).requires_grad_(False)
    if cast_first:
        torch_bf16.cast_model(reference)
    model, optimizer = prepared(trained)
    if not cast_first:
        torch_bf16.cast_model(reference)
    expected = r"'0.weight' of a Sequential of which .* call float\(\) on that Sequential"
    with pytest.warns(UserWarning, match=expected) as caught:
        train(model, optimizer, model, reference, mul_add)
    assert len(caught) == 1
    before = reference.float()[0].weight.clone()
    train(model, optimizer, model, reference, mul_add, 2 * STEPS)
    assert (reference[0].weight != before).float().mean() > 0.99


def test_modules_of_a_model_cast_apart_are_not_named_beside_those_of_the_trained_one():
    model, optimizer = prepared(Siamese())
    reference = torch_bf16.cast_model(nn.Sequential(copy.deepcopy(model.online)).float())

    def both(target, weight):
        mul_add(target, weight)
        for mine, theirs in zip(reference.parameters(), model.online.parameters(), strict=True):
            mul_add(mine, theirs)

    with pytest.warns(UserWarning, match=r"=\['target\*'\] keeps it in fp32"):
        train(model, optimizer, model.online, model.target, both)
