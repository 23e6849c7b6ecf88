"""A cast that breaks off, and one that meets torch's switches for conversions."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_bf16
from torch_bf16 import cast_model


def test_a_cast_that_breaks_off_goes_on_where_it_was(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)

    def fail(function):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(model[1], "_apply", fail)
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            cast_model(model, "bf16-fp32-master")
    assert [each.weight.dtype for each in model] == [torch.bfloat16, torch.float32]
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
    cast_model(model, "bf16-fp32-master")
    optimizer = torch_bf16.AdamW(model.parameters(), recipe="bf16-fp32-master")
    for name, p in model.named_parameters():
        assert torch.equal(optimizer.exact_weight(p), exact[name])


class Shortage(TorchDispatchMode):
    """Lets one operation that takes memory fail, and counts them."""

    VIEWS = ("detach", "view", "t", "split")

    def __init__(self, at):
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket.__name__ not in self.VIEWS:
            self.count += 1
            if self.count == self.at:
                raise torch.OutOfMemoryError("no room")
        return operation(*args, **(kwargs or {}))


def test_a_cast_loses_nothing_wherever_memory_runs_out():
    torch.manual_seed(0)
    at, met = 0, True
    while met:
        at += 1
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        exact = {name: p.detach().clone() for name, p in model.named_parameters()}
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with contextlib.suppress(torch.OutOfMemoryError), Shortage(at) as shortage:
            cast_model(model, "bf16-fp32-master")
        met = shortage.count >= at
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
        cast_model(model, "bf16-fp32-master")
        optimizer = torch_bf16.AdamW(model.parameters(), recipe="bf16-fp32-master")
        for name, p in model.named_parameters():
            assert torch.equal(optimizer.exact_weight(p), exact[name]), at
    assert at > 40


def test_parameters_keep_their_identity_where_torch_is_told_to_replace_them():
    model = nn.Linear(8, 8)
    before = [*model.parameters()]
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        cast_model(model)
        assert torch.__future__.get_overwrite_module_params_on_conversion()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
