"""A step that an error or an interrupt ends, and what the optimizer knows after it."""

import pytest
import torch
from optimizer_cases import make_optimizer
from torch import nn

from torch_bf16.engine import launches

BF16 = torch.bfloat16


def contiguous():
    return torch.randn(8, 8).to(BF16)


def transposed():
    return torch.randn(8, 8).to(BF16).t()


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


@pytest.mark.parametrize("error", [MemoryError("full"), KeyboardInterrupt()], ids=lambda e: repr(e))
@pytest.mark.parametrize("weight", [contiguous, transposed])
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_masters_of_what_was_updated_before_an_error_stay(backend, weight, error, monkeypatch):
    failed = trained(backend, weight, error, monkeypatch)
    assert torch.equal(failed, trained(backend, weight, None, monkeypatch))
