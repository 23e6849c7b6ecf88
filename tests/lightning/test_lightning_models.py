"""Models as users have them, one of transformers and a CNN with batch norm, next to fp32."""

from __future__ import annotations

import pytest
import torch
from lightning_models import host, loader, make_module, make_trainer
from torch import nn
from torch.nn import functional as F

PL = host("lightning.pytorch")


class Block(nn.Module):
    """torchvision's BasicBlock."""

    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(
            nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
        )

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + self.downsample(x))


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        Block(8, 16, 2),
        Block(16, 16, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def pictures():
    """Four kinds of gratings in noise."""
    generator = torch.Generator().manual_seed(0)
    waves = torch.stack([torch.sin((kind + 1) * torch.arange(12.0) / 2) for kind in range(4)])
    kinds = torch.randint(4, (40, 16), generator=generator)
    noise = torch.randn(40, 16, 3, 12, 12, generator=generator)
    return [(0.7 * n + waves[k][:, None, None] + 0.5, k) for n, k in zip(noise, kinds, strict=True)]


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config)


def sentences():
    """Each token follows from the one before, by a table."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(32, generator=generator)
    batches = []
    for _ in range(40):
        rows = [torch.randint(32, (4,), generator=generator)]
        for _ in range(15):
            rows.append(table[rows[-1]])
        batches.append((torch.stack(rows, 1),))
    return batches


def loss_of_pictures(self, batch, batch_idx):
    return F.cross_entropy(self(batch[0]), batch[1])


def loss_of_sentences(self, batch, batch_idx):
    return self.net(input_ids=batch[0], labels=batch[0]).loss


MODELS = {
    "resnet": (resnet, pictures, loss_of_pictures),
    "llama": (llama, sentences, loss_of_sentences),
}
_KNOWN: dict[tuple[str, str], Trained] = {}


class Trained:
    """Losses of 80 steps, the module after them, and what its batch norms should hold."""

    def __init__(self, name, precision):
        make, data, step = MODELS[name]
        self.losses, self.expected = [], {}

        def training_step(module, batch, batch_idx):
            loss = step(module, batch, batch_idx)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(module):
            return torch.optim.AdamW(module.parameters(), lr=3e-3)

        hooks = {"training_step": training_step, "configure_optimizers": configure_optimizers}
        self.module = make_module(PL, **hooks)
        torch.manual_seed(1)
        self.module.net = make()
        for norm in self.norms():
            norm.register_forward_pre_hook(self.follow)
        make_trainer(PL, precision, max_epochs=2).fit(self.module, loader(data()))

    def norms(self):
        return [each for each in self.module.modules() if isinstance(each, nn.BatchNorm2d)]

    def follow(self, norm, inputs):
        """The running statistics, in fp64, of what this norm is given."""
        values = inputs[0].detach().double().transpose(0, 1).flatten(1)
        zero, one = torch.zeros(len(values)), torch.ones(len(values))
        mean, variance = self.expected.get(norm, (zero.double(), one.double()))
        now = values.mean(1), values.var(1)
        self.expected[norm] = mean.lerp(now[0], 0.1), variance.lerp(now[1], 0.1)


def trained(name, precision):
    """Once for each."""
    if (name, precision) not in _KNOWN:
        _KNOWN[name, precision] = Trained(name, precision)
    return _KNOWN[name, precision]


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_falls_as_in_fp32(name, mode):
    fp32, ours, control = (
        torch.tensor(trained(name, each).losses).double() for each in ("32-true", mode, "bf16-true")
    )
    assert fp32[-20:].mean() < 0.1 * fp32[0]
    # bf16 rounds a logit between 1 and 2 by up to 2^-8, and the loss moves by at most twice the
    # largest of these; on average over tokens or pictures, of either sign, by less than one.
    assert (ours - fp32).abs().mean() < 2**-8 < 0.5 * (control - fp32).abs().mean()
    ends = [losses[-20:].mean() for losses in (fp32, ours, control)]
    assert abs(ends[1] - ends[0]) < 2**-10 < 0.1 * (ends[2] - ends[0])


def test_batch_norms_hold_the_statistics_of_what_they_were_given(mode):
    for precision in (mode, "bf16-true"):
        run = trained("resnet", precision)
        errors = []
        for norm in run.norms():
            assert int(norm.num_batches_tracked) == 80
            mean, variance = run.expected[norm]
            spread = variance.sqrt()
            errors.append(((norm.running_mean.double() - mean) / spread).abs().max().item())
            errors.append((norm.running_var.double() / variance - 1).abs().max().item())
        # fp32 arithmetic over 80 steps, and the control.
        assert max(errors) < 1e-5 if precision == mode else max(errors) > 1e-2
