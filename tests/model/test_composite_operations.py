"""Under a mode that watches operations, in inference mode too, composite ones keep autocast."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import torch_bf16

X = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(3))


class Einsum(nn.Linear):
    def forward(self, input):
        return torch.einsum("bti,oi->bto", input, self.weight) + self.bias


class Convolution(nn.Conv1d):
    def forward(self, input):
        return F.conv1d(input.mT, self.weight, self.bias, padding="same").mT


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


MODULES = {
    "einsum": (lambda: Einsum(4, 6), X),
    "conv1d.padding": (lambda: Convolution(4, 6, 1), X),
    "lstm": (lambda: nn.LSTM(4, 6), X),
    "gru": (lambda: nn.GRU(4, 6), X),
    "rnn": (lambda: nn.RNN(4, 6), X),
    "lstm of a packed sequence": (
        lambda: nn.LSTM(4, 6),
        nn.utils.rnn.pack_padded_sequence(X, [3, 2]),
    ),
    "lstm_cell": (lambda: nn.LSTMCell(4, 6), X[0]),
    "gru_cell": (lambda: nn.GRUCell(4, 6), X[0]),
    "rnn_cell": (lambda: nn.RNNCell(4, 6, nonlinearity="relu"), X[0]),
    "linear": (lambda: nn.Linear(4, 6), X),
}


def first(outputs):
    return outputs if isinstance(outputs, torch.Tensor) else first(outputs[0])


@pytest.mark.parametrize("compute", ["autocast", "fp32"])
@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_what_a_mode_watches_is_what_runs_without_it(name, inference, compute):
    make, x = MODULES[name]
    torch.manual_seed(0)
    module = torch_bf16.cast_model(make())
    with torch.inference_mode(inference), torch_bf16.arithmetic("cpu", compute):
        expected = first(module(x))
        with FlopCounterMode(display=False) as counter:
            counted = first(module(x))
        with Watching():
            watched = first(module(x))
    for found in (counted, watched):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    assert counter.get_total_flops() > 0 or name.startswith(("lstm", "gru", "rnn"))


@pytest.mark.parametrize("compute", ["autocast", "fp32"])
def test_the_fused_layer_of_an_encoder_runs_under_a_mode(compute):
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0).eval()
    torch_bf16.cast_model(layer)
    with torch.no_grad(), torch_bf16.arithmetic("cpu", compute):
        expected = layer(X)
        with Watching():
            watched = layer(X)
    assert watched.dtype == expected.dtype
    assert torch.allclose(watched.float(), expected.float(), atol=0.05)


def test_gradients_under_a_mode_are_those_without_it():
    gradients = []
    for watched in (False, True):
        torch.manual_seed(0)
        module = torch_bf16.cast_model(nn.Sequential(Einsum(4, 6), nn.GRU(6, 5)))
        with torch.autocast("cpu", torch.bfloat16):
            if watched:
                with Watching():
                    loss = first(module(X)).float().square().sum()
            else:
                loss = first(module(X)).float().square().sum()
        loss.backward()
        gradients.append([p.grad for p in module.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_without_autocast_a_mode_receives_whole_operations_as_torch_gives_them():
    seen = []

    class Names(Watching):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return super().__torch_dispatch__(func, types, args, kwargs)

    torch_bf16.cast_model(nn.Linear(2, 2))
    with torch.inference_mode(), Names():
        Einsum(4, 6)(X)
    assert "aten::einsum" in seen
