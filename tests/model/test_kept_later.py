"""keep_fp32 where a model is bf16 already, or becomes so later."""

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16 import cast_model, get_recipe
from torch_bf16.plugin_api import fp32_parameters

BF16 = torch.bfloat16


class Spy(nn.Linear):
    """Notes the dtypes of its input and weight, and whether autocast is on."""

    seen = None

    def forward(self, x):
        self.seen = (x.dtype, self.weight.dtype, torch.is_autocast_enabled("cpu"))
        return super().forward(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = Spy(4, 3)

    def forward(self, x):
        return self.head(self.body(x))


def keeping(key):
    return get_recipe("bf16-stochastic", keep_fp32=(key,))


def dtypes(module):
    return {p.dtype for p in module.parameters()}


@pytest.mark.parametrize("key", ["head", "head.*"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_what_shall_be_kept_and_came_in_half_precision_becomes_fp32(key, dtype):
    """transformers loads checkpoints in the dtype that they were saved in."""
    module = Net().bfloat16()
    module.head.to(dtype)
    parameters = dict(module.named_parameters())
    before = module.head.weight.detach().clone()
    module.head.weight.grad = torch.ones_like(before)
    assert sorted(fp32_parameters(module, keeping(key))) == ["head.bias", "head.weight"]
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    module, optimizer = torch_bf16.prepare(module, optimizer, keeping(key))
    assert dtypes(module.head) == {torch.float32}
    assert dtypes(module.body) == {BF16}
    assert dict(module.named_parameters()) == parameters
    assert torch.equal(module.head.weight, before.float())
    assert module.head.weight.grad.dtype == torch.float32
    with torch.autocast("cpu", BF16):
        module(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert optimizer.state[module.head.weight]["exp_avg"].dtype == torch.float32
    assert not torch.equal(module.head.weight, before.float())


@pytest.mark.parametrize("cast", [cast_model, nn.Module.bfloat16])
def test_an_island_that_is_cast_later_computes_like_the_others(cast):
    module = cast(cast_model(Net(), keeping("head")))
    with torch.autocast("cpu", BF16):
        assert module(torch.randn(2, 4)).dtype == BF16
    assert module.head.seen == (BF16, BF16, True)


def test_a_forward_that_an_instance_has_is_called_in_fp32():
    module = Net()
    own = module.head.forward
    module.head.forward = lambda x: 100 * own(x)
    x = torch.randn(2, 4)
    expected = module.head(x)
    for _ in range(2):
        cast_model(module, keeping("head"))
        assert torch.equal(module.head(x), expected)
        with torch.autocast("cpu", BF16):
            assert torch.equal(module.head(x), expected)
    depth, forward = 0, module.head.forward
    while hasattr(forward, "func"):
        depth, forward = depth + 1, forward.args[1]
    assert depth == 1


def test_a_module_that_carries_autocast_and_is_kept_later_computes_in_fp32():
    module = Net()
    x = torch.randn(2, 4)
    expected = module.head(x)
    torch_bf16.carry_autocast(module)
    cast_model(module, keeping("head"))
    assert torch.equal(module.head(x), expected)
    assert module.head.seen[:2] == (torch.float32, torch.float32)
