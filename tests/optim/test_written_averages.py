"""Schedule-free optimizers: what was written in eval mode is the average, and only that."""

import copy
import pickle

import pytest
import torch
from optimizer_cases import every_recipe, make_optimizer, make_parameters, parameters_of, take_steps

from torch_bf16.optim import schedule_free


def evaluated(recipe):
    """An optimizer in eval mode, and the exact weights of its train mode."""
    parameters = make_parameters(0)
    optimizer = make_optimizer("schedule_free_adamw", recipe, "eager", parameters.items())
    take_steps(optimizer, range(5))
    ys = [optimizer.exact_weight(p).clone() for p in parameters_of(optimizer)]
    optimizer.eval()
    return optimizer, ys


def with_numbers(optimizer):
    return [p for p in parameters_of(optimizer) if p.numel()]


def first(tensor):
    return (0,) * tensor.ndim


def copied(parameter):
    with torch.no_grad():
        parameter.copy_(torch.full_like(parameter, 0.5))


def by_data(parameter):
    parameter.data.copy_(torch.full_like(parameter, 0.5))


def put_there(parameter):
    parameter.data = torch.full_like(parameter, 0.5)


def nothing(optimizer):
    return optimizer


def saved_and_loaded(optimizer):
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer


def through_a_file(optimizer):
    optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    return optimizer


@every_recipe
@pytest.mark.parametrize("then", [nothing, saved_and_loaded, through_a_file, copy.deepcopy])
@pytest.mark.parametrize("write", [copied, by_data, put_there])
def test_weights_written_in_eval_mode_are_taken_for_the_average(recipe, write, then):
    optimizer, _ = evaluated(recipe)
    for p in parameters_of(optimizer):
        write(p)
    optimizer = then(optimizer)
    optimizer.train()
    for p in parameters_of(optimizer):
        z = optimizer.state[p]["z"].float()
        expected = 0.5 + (z - 0.5) * (1.0 - 0.9)
        assert torch.allclose(p.float(), expected, rtol=2**-8)
        assert "y" not in optimizer.state[p]


@every_recipe
@pytest.mark.parametrize("then", [saved_and_loaded, through_a_file, copy.deepcopy])
def test_weights_that_nobody_wrote_are_what_they_were(recipe, then):
    optimizer, ys = evaluated(recipe)
    optimizer = then(optimizer)
    optimizer.train()
    assert all(map(torch.equal, map(optimizer.exact_weight, parameters_of(optimizer)), ys))


@every_recipe
def test_only_the_numbers_that_were_written_count_as_the_average(recipe):
    optimizer, ys = evaluated(recipe)
    for p in with_numbers(optimizer):
        p.data[first(p)] *= -1
    optimizer.train()
    for p, y in zip(parameters_of(optimizer), ys, strict=True):
        expected = torch.zeros_like(y, dtype=torch.bool)
        if y.numel():
            expected[first(y)] = True
        assert torch.equal(optimizer.exact_weight(p) != y, expected)


@every_recipe
def test_numbers_without_an_average_come_back(recipe):
    """An iterate that is NaN makes NaN of the average, but not of the weights in train mode."""
    optimizer, _ = evaluated(recipe)
    optimizer.train()
    ys = [optimizer.exact_weight(p).clone() for p in parameters_of(optimizer)]
    for p in with_numbers(optimizer):
        optimizer.state[p]["z"][first(p)] = torch.nan
    optimizer.eval()
    assert all(p[first(p)].isnan() for p in with_numbers(optimizer))
    optimizer.train()
    assert all(map(torch.equal, map(optimizer.exact_weight, parameters_of(optimizer)), ys))


@every_recipe
def test_train_that_fails_anywhere_gives_every_bit_back_when_it_is_called_again(
    recipe, monkeypatch
):
    optimizer, ys = evaluated(recipe)
    real = {name: getattr(schedule_free, name) for name in ("fetch", "local", "shard_of")}
    for name, function in real.items():
        calls = []

        def fails(*arguments, function=function, calls=calls):
            calls.append(arguments)
            if len(calls) in (2, 5):
                raise torch.OutOfMemoryError("out of memory")
            return function(*arguments)

        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(schedule_free, name, fails)
                with pytest.raises(torch.OutOfMemoryError):
                    optimizer.train()
        optimizer.train()
        assert all(map(torch.equal, map(optimizer.exact_weight, parameters_of(optimizer)), ys))
        optimizer.eval()
