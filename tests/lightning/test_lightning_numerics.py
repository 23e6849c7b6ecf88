"""Clipping, accumulation, default dtype, buffers, metrics: what must not be lost."""

from __future__ import annotations

import math

import pytest
import torch
from lightning_models import batches, host, make_module, make_trainer, network
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
        ((p.detach().view(torch.int16).int() << 16) + optimizer.state[p]["remainder16"].int()).view(
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
        assert self.made[0]._engine.pending.coefficient == 1.0

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


def test_clipping_by_value_comes_on_top_of_the_norm(pl, mode):
    seen = []

    def configure_gradient_clipping(self, optimizer, **_):
        exact = torch.stack([p.grad.double().norm() for p in self.parameters()]).norm()
        expected = [(p.grad / exact).clamp(-0.125, 0.125).float() for p in self.parameters()]
        self.clip_gradients(optimizer, 1.0, "norm")
        self.clip_gradients(optimizer, 0.125, "value")
        seen.extend(zip(expected, [p.grad.float() for p in self.parameters()], strict=True))

    hooks = {"configure_gradient_clipping": configure_gradient_clipping}
    module = make_module(pl, configure_optimizers=plain_sgd, **hooks)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(4)
    make_trainer(pl, mode).fit(module, batches(2))
    assert seen
    for expected, found in seen:
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=1e-6)


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
    torch_bf16.cast_model(net, mode)
    optimizer = torch_bf16.convert(torch.optim.AdamW(net.parameters(), lr=1e-2), mode, model=net)
    for number, (x, y) in enumerate(batches(8), start=1):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = F.cross_entropy(net["net"](x).float(), y) / 4
        loss.backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    for ours, by_hand in zip(module.net.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours.view(torch.int16), by_hand.view(torch.int16))


@pytest.mark.parametrize(
    ("precision", "learns"),
    [("bf16-stochastic", True), ("bf16-fp32-master", True), ("bf16-true", False)],
)
def test_updates_below_half_an_ulp_add_up_and_in_stock_bf16_true_they_do_not(precision, learns):
    """200 steps of 1e-3 from 1.0, where bf16 has 0.0039 between neighbours, in 1024 weights.

    One weight wanders by sqrt(sum of steps * ulp) = 0.028, so their mean by 0.0009.
    """

    def configure_optimizers(self):
        return torch.optim.AdamW([self.weight], lr=1e-3, weight_decay=0.0)

    def training_step(self, batch, batch_idx):
        return self.weight.float().sum()

    hooks = {"configure_optimizers": configure_optimizers, "training_step": training_step}
    module = make_module(host("lightning.pytorch"), **hooks)
    module.weight = nn.Parameter(torch.ones(32, 32))
    make_trainer(host("lightning.pytorch"), precision).fit(module, batches(1, repeat=200))
    mean = float(module.weight.detach().double().mean())
    assert abs(mean - 0.8) < 0.005 if learns else mean == 1.0


@pytest.mark.parametrize("compute", ["autocast", "fp32", "bf16"])
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
    assert f"{names[stage]}_step" not in vars(module)
    # What it carries along to be called outside of a step rests without bf16.
    assert module.float()(torch.ones(2, 8)).dtype == torch.float32


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
