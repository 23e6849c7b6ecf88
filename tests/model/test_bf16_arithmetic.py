"""Models with ``compute="bf16"``, where no autocast brings tensors of two dtypes together."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from carried_parts import BodyAndHead
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import torch_bf16
from torch_bf16 import plugin_api

X = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(5))


def cast(net: nn.Module, *keep: str) -> Any:
    recipe = torch_bf16.get_recipe("bf16-stochastic", compute="bf16", keep_fp32=keep)
    return torch_bf16.cast_model(net, recipe)


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 16)
        self.cells = kind(16, 16, batch_first=True)

    def forward(self, x):
        start = torch.zeros(1, len(x), 16)
        hidden = (start, start) if isinstance(self.cells, nn.LSTM) else start
        return self.after(self.cells(self.before(x), hidden)[0])


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def layers(*others: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), *others, nn.Linear(16, 16))


NETS = {
    "linear": (lambda: layers(nn.Linear(16, 16), nn.GELU()), "1"),
    "layer_norm": (lambda: layers(nn.LayerNorm(16)), "1"),
    "a norm after it": (lambda: layers(nn.LayerNorm(16)), "0"),
    "convolution": (lambda: nn.Sequential(*(nn.Conv1d(8, 8, 3) for _ in range(3))), "1"),
    "before an LSTM": (lambda: Recurrent(nn.LSTM), "before"),
    "a GRU": (lambda: Recurrent(nn.GRU), "cells"),
    "a parametrised layer after it": (lambda: layers(weight_norm(nn.Linear(16, 16))), "0"),
    "norms": (encoder, "layers.*.norm?"),
    "norms first": (lambda: encoder(norm_first=True), "layers.*.norm1"),
    "attention": (encoder, "layers.0.self_attn"),
    "a product in a layer": (encoder, "layers.0.linear1"),
    "a whole layer": (encoder, "layers.0"),
    "the last": (lambda: layers(), "1"),
}


@pytest.mark.parametrize("name", NETS)
def test_any_part_can_stay_in_fp32(name):
    make, keep = NETS[name]
    torch.manual_seed(0)
    net = make()
    expected = copy.deepcopy(net)(X)
    outputs = cast(net, keep)(X)
    outputs.square().mean().backward()
    assert torch.allclose(outputs, expected, atol=0.05)
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32, torch.bfloat16}
    with torch.no_grad():  # encoders have a fused kernel here
        assert torch.allclose(net.eval()(X), expected, atol=0.05)


def test_a_kept_part_computes_on_fp32_and_its_output_is_not_rounded():
    net = cast(layers(nn.Identity(), nn.Linear(16, 16)), "2")
    seen = []
    for each in (net[2], net[3]):
        each.register_forward_hook(lambda _, inputs, output: seen.append(output))
    net(X)
    kept, last = seen
    assert kept.dtype == torch.float32
    assert not torch.equal(kept, kept.bfloat16().float())
    assert last.dtype == torch.bfloat16
    assert torch.equal(last, net[3](kept.bfloat16()).bfloat16())


@pytest.mark.parametrize("name", ["linear", "a parametrised layer after it"])
def test_a_compiled_model_casts_between_its_parts_too(name):
    make, keep = NETS[name]
    net = cast(make(), keep)
    compiled: Any = torch.compile(net, backend="eager", fullgraph=True)
    with torch.no_grad():  # torch.compile's own warnings about gradients are errors here
        assert torch.equal(compiled(X), net(X))


class Reader(nn.Linear):
    """Also takes what it only reads, and what it writes into."""

    def forward(self, x, index=None, cache=None):
        self.given = x, index, cache
        return super().forward(x)


def test_only_what_is_cast_becomes_another_object():
    net = cast(nn.Sequential(Reader(16, 16)))
    x, index, cache = X.bfloat16(), torch.arange(3), {"keys": [torch.ones(2, dtype=torch.bfloat16)]}
    with plugin_api.inside_step():
        net[0](x, index, cache=cache)
        assert all(map(lambda a, b: a is b, net[0].given, (x, index, cache)))
        net[0](X, cache={"keys": [X]})
    assert net[0].given[0].dtype == net[0].given[2]["keys"][0].dtype == torch.bfloat16


def test_under_autocast_a_part_is_given_what_its_caller_gives():
    net = cast(nn.Sequential(Reader(16, 16)))
    with plugin_api.inside_step(), torch.autocast("cpu", torch.bfloat16):
        net(X)
    assert net[0].given[0] is X


def test_a_compiled_part_is_inside_the_step_though_another_thread_ends_its_own():
    net = cast(nn.Linear(16, 16))
    compiled: Any = torch.compile(net, backend="eager")
    with torch.no_grad():
        assert compiled(X).dtype == torch.float32
        with plugin_api.inside_step():
            alone = compiled(X).dtype
            with ThreadPoolExecutor(1) as threads:
                threads.submit(pass_through_a_step).result()
            assert compiled(X).dtype == alone == torch.bfloat16


def pass_through_a_step():
    with plugin_api.inside_step():
        pass


class Tied(BodyAndHead):
    """Multiplies with the weight of its head itself."""

    def forward(self, x):
        return nn.functional.linear(self.body(x), self.head.weight)


def test_an_error_names_the_part_in_which_two_dtypes_met_and_what_works():
    whole = nn.Sequential(Tied())
    with pytest.raises(RuntimeError, match=r"met in '0' \(Tied\), and compute='bf16' .*") as caught:
        cast(whole, "0.body")(X[..., :8])
    for words in ("same dtype", "keep_fp32=['0']", "BF16_KEEP_FP32=0", "compute at 'autocast'"):
        assert words in str(caught.value)
    with pytest.raises(RuntimeError, match=r"met in Tied, and .* given\. Convert the tensor there"):
        cast(Tied(), "body")(X[..., :8])
    with pytest.raises(RuntimeError) as other:
        cast(Tied())(X)
    assert "compute" not in str(other.value)


class Factored(nn.Linear):
    def forward(self, x):
        return x @ torch.linalg.qr(self.weight).Q


def test_a_function_without_a_bf16_kernel_is_not_said_to_mix_dtypes():
    with pytest.raises(RuntimeError) as caught:
        cast(nn.Sequential(Factored(16, 16)))(X)
    assert "two dtypes" not in str(caught.value)
