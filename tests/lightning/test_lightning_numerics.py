"""Clipping, accumulation, default dtype, buffers, metrics: what must not be lost."""

from __future__ import annotations

import math

import pytest
import torch
from lightning_models import batches, host, loader, make_module, make_trainer, network
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

import torch_bf16

FAMILIES = ("pytorch", "fabric", "pytorch_lightning", "lightning_fabric")


def plain_sgd(self):
    return torch.optim.SGD(self.parameters(), lr=0.5)


def masters_before(module):
    return [p.detach().clone() for p in module.parameters()]


def fp32_masters(trainer):
    """What bf16-fp32-master trains: upper halves from weights, lower ones from the state."""
    optimizer = trainer.optimizers[0]
    return [
        ((p.detach().view(torch.int16).int() << 16) + optimizer.state[p]["remainder"].int()).view(
            torch.float32
        )
        for group in optimizer.param_groups
        for p in group["params"]
    ]


@pytest.mark.parametrize("limit", [0.05, 1000.0], ids=["clipping", "no-op"])
def test_clipping_by_norm_is_fp32_arithmetic_on_the_bf16_gradients(pl, limit):
    gradients = []

    def on_before_optimizer_step(self, optimizer):
        gradients.extend(p.grad.double() for p in self.parameters())

    hooks = {
        "configure_optimizers": plain_sgd,
        "on_before_optimizer_step": on_before_optimizer_step,
    }
    module = make_module(pl, **hooks)
    weights = masters_before(module)
    trainer = make_trainer(pl, "bf16-fp32-master", gradient_clip_val=limit)
    trainer.fit(module, batches(1))

    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    assert (norm > limit) == (limit < 1)
    coefficient = min(1.0, limit / (norm + 1e-6))
    for weight, gradient, trained in zip(weights, gradients, fp32_masters(trainer), strict=True):
        expected = weight.double() - 0.5 * coefficient * gradient
        torch.testing.assert_close(trained.double(), expected, rtol=3e-7, atol=1e-9)


def test_clipping_by_norm_leaves_gradients_unclipped_in_memory_and_ends_with_the_step(pl):
    norms = []

    def note(self, *_):
        norms.append(float(torch_bf16.total_norm(self.parameters())))

    def on_train_batch_end(self, *_):
        assert self.made[0]._next_scale == 1.0

    def configure_optimizers(self):
        self.made = [plain_sgd(self)]
        return self.made[0]

    hooks = {"on_before_optimizer_step": note, "on_before_zero_grad": note}
    module = make_module(
        pl,
        configure_optimizers=configure_optimizers,
        on_train_batch_end=on_train_batch_end,
        **hooks,
    )
    make_trainer(pl, "bf16-stochastic", gradient_clip_val=0.01).fit(module, batches(2))
    # zero_grad before any backward, gradients of the first step, the same at the next zero_grad
    assert norms[0] == 0
    assert norms[1] == norms[2] > 0.01


def test_clipping_by_value_changes_the_gradients_as_stock_does(pl):
    seen = []

    def on_before_zero_grad(self, optimizer):
        seen.extend(p.grad for p in self.parameters() if p.grad is not None)

    hooks = {"configure_optimizers": plain_sgd, "on_before_zero_grad": on_before_zero_grad}
    module = make_module(pl, **hooks)
    weights = masters_before(module)
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    trainer = make_trainer(pl, "bf16-fp32-master", **options)
    trainer.fit(module, batches(1))
    assert not seen
    gradients = [p.grad for p in module.parameters()]
    limit = torch.tensor(0.01).bfloat16()
    assert max(float(g.abs().max()) for g in gradients) == float(limit)
    for weight, gradient, trained in zip(weights, gradients, fp32_masters(trainer), strict=True):
        assert torch.equal(trained, weight - gradient.float() * 0.5)


def test_clipping_by_hand_in_manual_optimization_scales_the_gradients_in_place(pl):
    norms = []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        norms.append(float(torch_bf16.total_norm(self.parameters())))
        optimizer.step()
        optimizer.zero_grad()

    module = make_module(pl, training_step=training_step)
    module.automatic_optimization = False
    make_trainer(pl, "bf16-stochastic").fit(module, batches(2))
    assert norms == pytest.approx([0.01, 0.01], rel=4e-3)


def test_accumulation_equals_a_loop_by_hand_bit_for_bit(pl, mode):
    module = make_module(pl)
    trainer = make_trainer(pl, mode, accumulate_grad_batches=4)
    trainer.fit(module, batches(8))
    assert trainer.global_step == 2

    torch.manual_seed(0)
    net = nn.ModuleDict({"net": network()})
    torch_bf16.cast_module(net, mode)
    optimizer = torch_bf16.convert(torch.optim.AdamW(net.parameters(), lr=1e-2), mode, module=net)
    for number, (x, y) in enumerate(batches(8), start=1):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = F.cross_entropy(net["net"](x).float(), y) / 4
        loss.backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    for ours, by_hand in zip(module.net.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours.view(torch.int16), by_hand.view(torch.int16))


@pytest.mark.parametrize("compute", ["autocast", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "context", ["tensor_init_context", "module_init_context", "forward_context"]
)
def test_the_default_dtype_and_autocast_survive_an_exception_in_a_context(family, context, compute):
    plugin = host(f"lightning_bf16.{family}").BF16Precision(compute=compute)

    def body():
        with getattr(plugin, context)():
            assert torch.get_default_dtype() == torch.float32
            assert torch.zeros(1).dtype == torch.float32
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        body()
    assert torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("stage", ["train", "val", "test", "predict"])
def test_an_exception_in_a_step_leaves_the_module_and_the_default_dtype_as_they_were(pl, stage):
    def step(self, *_):
        raise RuntimeError(f"inside {torch.get_default_dtype()}")

    names = {"train": "training", "val": "validation", "test": "test", "predict": "predict"}
    module = make_module(pl, **{f"{names[stage]}_step": step})
    trainer = make_trainer(pl, "bf16-stochastic")
    run = {"train": trainer.fit, "val": trainer.validate}.get(stage) or getattr(trainer, stage)
    with pytest.raises(RuntimeError, match=r"inside torch\.float32"):
        run(module, batches(1))
    assert torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert not {"forward", f"{names[stage]}_step"} & vars(module).keys()


def test_metrics_and_buffers_of_the_module_stay_exact(pl):
    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            frequencies = 10000.0 ** -(torch.arange(0, 8) / 8)
            self.register_buffer("inv_freq", frequencies)
            self.register_buffer("freqs_cis", torch.polar(torch.ones(8), frequencies))
            self.count = MeanMetric()

    def training_step(self, batch, batch_idx):
        for _ in range(1000):
            self.held.count.update(1.0)
        return self(batch[0]).square().mean() + self.held.weight.sum()

    module = make_module(pl, training_step=training_step)
    module.held = Held()
    before = {name: b.clone() for name, b in module.held.named_buffers()}
    make_trainer(pl, "bf16-stochastic").fit(module, batches(1))
    assert float(module.held.count.weight) == 1000
    assert {b.dtype for b in module.buffers()} == {torch.float32, torch.complex64}
    for name, buffer in before.items():
        assert torch.equal(dict(module.held.named_buffers())[name], buffer)
    assert module.held.weight.dtype == torch.bfloat16


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
    from lightning_bf16.cpu_autocast import fill_gaps

    fill_gaps()
    norm = nn.LayerNorm(8)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, 8))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    bf16 = torch_bf16.cast_module(nn.LayerNorm(8))
    bf16.load_state_dict(norm.state_dict())
    norm.load_state_dict(bf16.state_dict())
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert torch.equal(bf16(x), norm(x))
        assert bf16(x.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="mixed dtype"):
        bf16(x)
