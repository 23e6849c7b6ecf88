"""A cast that breaks off, and one that meets torch's switches for conversions."""

import pytest
import torch
from torch import nn

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
