"""A step that an error or an interrupt ends, and what the optimizer knows after it."""

from itertools import product

import pytest
import torch
from optimizer_cases import make_optimizer
from torch import nn

from torch_bf16 import Adafactor
from torch_bf16.backends import eager
from torch_bf16.engine import launches

BF16 = torch.bfloat16


def contiguous():
    return torch.randn(8, 8).to(BF16)


def copied():
    """In an order that kernels cannot walk."""
    return torch.randn(4, 8, 8).to(BF16).permute(2, 1, 0)


def trained(backend, weight, error, monkeypatch):
    """A bf16 and an fp32 matrix, which two calls update, the second of which fails in one step."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(weight()), nn.Parameter(torch.randn(8, 8))]
    optimizer = make_optimizer("adamw", "master", backend, parameters)
    optimizer.param_groups[0]["lr"] = 1e-4
    run, calls = launches.Launch.run, []

    def failing(self, *given):
        calls.append(self)
        if len(calls) == 1 or isinstance(error, KeyboardInterrupt):
            run(self, *given)
        if len(calls) == 2:
            raise error

    for number in range(6):
        for each in parameters:
            each.grad = torch.randn_like(each)
        if number == 3 and error is not None:
            with monkeypatch.context() as patch:
                patch.setattr(launches.Launch, "run", failing)
                with pytest.raises(type(error)):
                    optimizer.step()
            # What an interrupt found in a kernel was updated, too; else the second one steps now.
            for each in parameters:
                if float(optimizer.state[each]["step"]) == 4:
                    each.grad = None
            assert parameters[0].grad is None
        optimizer.step()
    return optimizer.exact_weight(parameters[0])


@pytest.mark.parametrize(
    ("backend", "weight", "error"),
    [
        *product(["cpu", "eager"], [contiguous, copied], [MemoryError("full")]),
        ("cpu", contiguous, KeyboardInterrupt()),
    ],
    ids=lambda given: getattr(given, "__name__", None) or repr(given),
)
def test_masters_of_what_was_updated_before_an_error_stay(backend, weight, error, monkeypatch):
    failed = trained(backend, weight, error, monkeypatch)
    assert torch.equal(failed, trained(backend, weight, None, monkeypatch))


@pytest.mark.parametrize(
    ("backend", "weight"), [("eager", contiguous), ("eager", copied), ("cpu", copied)]
)
def test_an_interrupt_of_a_launch_of_several_calls_says_that_it_may_be_half_done(
    backend, weight, monkeypatch, caplog
):
    parameters = [nn.Parameter(weight()) for _ in range(2)]
    optimizer = make_optimizer("adamw", "master", backend, parameters)
    for each in parameters:
        each.grad = torch.randn_like(each)
    optimizer.step()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(eager, "_encode", interrupted)
    monkeypatch.setattr(launches, "_copy_each", interrupted)
    with (
        caplog.at_level("WARNING", "torch_bf16"),
        pytest.raises(KeyboardInterrupt) as raised,
    ):
        optimizer.step()
    assert raised.value.args == ()
    (line,) = (each.getMessage() for each in caplog.records)
    assert "KeyboardInterrupt ended a step: 2 parameters may be updated in part" in line
    assert [float(optimizer.state[each]["step"]) for each in parameters] == [1, 1]


@pytest.mark.parametrize("error", [MemoryError("full"), KeyboardInterrupt()], ids=lambda e: repr(e))
@pytest.mark.parametrize("shape", [(8, 8), (8,), (3, 8, 8)])
def test_states_of_a_step_along_directions_go_with_the_weight(shape, error, monkeypatch):
    def trained(breaks):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(shape).to(BF16))
        optimizer = Adafactor([parameter], lr=1e-2, recipe="bf16-fp32-master", backend="cpu")
        follow = launches.Launch.follow

        def failing(self, *given):
            if isinstance(error, KeyboardInterrupt):
                follow(self, *given)
            raise error

        for number in range(3):
            parameter.grad = torch.randn(shape).to(BF16)
            if breaks and number == 1:
                with monkeypatch.context() as patch:
                    patch.setattr(launches.Launch, "follow", failing)
                    with pytest.raises(type(error)):
                        optimizer.step()
                if isinstance(error, KeyboardInterrupt):
                    continue  # it is known to be done
            optimizer.step()
        return optimizer.exact_weight(parameter), optimizer.state[parameter]

    (failed, states), (expected, alike) = trained(True), trained(False)
    assert torch.equal(failed, expected)
    assert states.keys() == alike.keys()
    assert all(torch.equal(each, alike[key]) for key, each in states.items())
