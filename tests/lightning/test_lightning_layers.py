"""Common layers train under the plugin on CPUs, on inputs that stay fp32."""

from __future__ import annotations

import pytest
import torch
from lightning_models import host, loader, make_module, make_trainer
from torch import nn

import torch_bf16


class Residual(nn.Module):
    """An fp32 input and an fp32 buffer meet bf16 weights behind the residual connection."""

    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), norm
        self.register_buffer("position", torch.randn(8))

    def forward(self, x):
        return self.norm(x + self.linear(x) + self.position)


class First(nn.Module):
    """Gives the tensor in what a recurrent layer returns."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x)


LAYERS = {
    "linear": lambda: nn.Linear(8, 8),
    "bilinear": lambda: Twice(nn.Bilinear(8, 8, 8)),
    "layer-norm": lambda: nn.LayerNorm(8),
    "rms-norm": lambda: nn.RMSNorm(8),
    "group-norm": lambda: nn.GroupNorm(2, 4),
    "instance-norm": lambda: nn.InstanceNorm1d(4, affine=True),
    "instance-norm-tracking": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    "batch-norm": lambda: nn.BatchNorm1d(4),
    "linear-batch-norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(4)),
    "residual-layer-norm": lambda: Residual(nn.LayerNorm(8)),
    "residual-rms-norm": lambda: Residual(nn.RMSNorm(8)),
    "residual-batch-norm": lambda: Residual(nn.BatchNorm1d(4)),
    "convolution": lambda: nn.Conv1d(4, 4, 3),
    "transposed-convolution": lambda: nn.ConvTranspose1d(4, 4, 3),
    "lstm": lambda: First(nn.LSTM(8, 8, 2, bidirectional=True)),
    "gru": lambda: First(nn.GRU(8, 8)),
    "rnn": lambda: First(nn.RNN(8, 8)),
    "prelu": lambda: nn.PReLU(),
    "encoder-layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "encoder-layer-norm-first": lambda: nn.TransformerEncoderLayer(
        8, 2, 16, batch_first=True, norm_first=True
    ),
    "decoder-layer": lambda: Twice(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)),
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "spectral-norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_trains_and_validates_on_fp32_inputs(layer):
    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.layer(batch).square().mean())

    hooks = {"training_step": training_step, "validation_step": validation_step}
    module = make_module(host("lightning.pytorch"), **hooks)
    module.net, module.layer = nn.Identity(), LAYERS[layer]()
    before = [p.detach().clone() for p in module.parameters()]
    data = loader([torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))] * 2)
    trainer = make_trainer(host("lightning.pytorch"), "bf16-fp32-master")
    trainer.fit(module, data, data)
    assert torch.isfinite(trainer.callback_metrics["loss"])
    assert any(
        not torch.equal(old, p.float()) for old, p in zip(before, module.parameters(), strict=True)
    )


def test_a_norm_of_an_fp32_input_computes_in_fp32():
    norm = nn.LayerNorm(8)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, 8))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    bf16 = torch_bf16.cast_model(nn.LayerNorm(8))
    bf16.load_state_dict(norm.state_dict())
    norm.load_state_dict(bf16.state_dict())
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert torch.equal(bf16(x), norm(x))
        assert bf16(x.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="mixed dtype"):
        bf16(x)
