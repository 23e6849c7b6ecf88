"""peft's fp32 adapters stay fp32 beside a base that is not."""

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16 import plugin_api

peft = pytest.importorskip("peft")


def adapted(dtype):
    """Two layers, of which the first has an adapter of peft in fp32."""
    model = nn.ModuleDict({"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)}).to(dtype)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["first"], r=2), model)
    for each in (model["first"].lora_A, model["first"].lora_B):
        each.float()
    return model


def dtypes(model):
    return {p.dtype for name, p in model.named_parameters() if "lora_" in name}


@pytest.mark.parametrize(
    ("base", "expected"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_a_cast_leaves_them_beside_a_bf16_base_alone(base, expected):
    model = adapted(base)
    kept = plugin_api.fp32_adapters(model)
    assert len(kept) == (2 if expected == torch.float32 else 0)
    for _ in range(2):  # a second cast knows what the first has cast
        torch_bf16.cast_model(model)
        assert dtypes(model) == {expected}
    assert model["second"].weight.dtype == torch.bfloat16
    named = plugin_api.fp32_parameters(model)
    assert {id(p) for p in named.values()} == {*map(id, kept)}
    assert not plugin_api.fp32_parameters(model, adapters=False)


def test_they_train_in_fp32():
    model = adapted(torch.bfloat16)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    torch_bf16.prepare(model, optimizer, torch_bf16.get_recipe("bf16-stochastic", compute="fp32"))
    for _ in range(2):
        model["first"](torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(optimizer.state[p]["exp_avg"].dtype == torch.float32 for p in trained)
    assert all(p.dtype == torch.float32 for p in trained)
