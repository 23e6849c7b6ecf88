"""A module whose ``parameters()`` leaves out what another optimizer trains is taken whole."""

from __future__ import annotations

import logging

import accelerate
import pytest
import torch
from torch import nn

import torch_bf16


class Tokenizer(nn.Module):
    """Lists its generator alone, for one optimizer; another trains its discriminator."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = nn.Linear(8, 8), nn.Linear(8, 8)

    def parameters(self, recurse=True):
        return [*self.generator.parameters(recurse)]

    def forward(self, x):
        return self.discriminator(self.generator(x))


@pytest.fixture
def gan():
    torch.manual_seed(0)
    model = Tokenizer()
    parts = model.generator, model.discriminator
    return model, [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in parts]


def test_masters_and_names_are_those_of_the_whole_module(gan):
    model, optimizers = gan
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch_bf16.prepare(model, optimizers, "bf16-fp32-master")
    saved = optimizers[1].state_dict()["torch_bf16"]["names"]
    assert saved == [["discriminator.weight", "discriminator.bias"]]
    exact = torch_bf16.fp32_state_dict(model, *optimizers)
    assert all(torch.equal(exact[name], value) for name, value in before.items())
    assert torch_bf16.describe(model, optimizers[0]).parameters == {"bfloat16": 144}


def test_an_optimizer_of_what_is_not_listed_is_one_of_the_module(gan):
    model, (_, optimizer) = gan
    torch_bf16.prepare(model, optimizer, "bf16-stochastic")
    assert {p.dtype for _, p in model.named_parameters()} == {torch.bfloat16}


def test_a_part_that_is_kept_in_fp32_is_kept_whole(gan):
    model, _ = gan
    outer = nn.Sequential(model, nn.Linear(8, 8))
    torch_bf16.cast_model(outer, torch_bf16.get_recipe("bf16-stochastic", keep_fp32=["0"]))
    assert {p.dtype for _, p in model.named_parameters()} == {torch.float32}


def test_an_average_follows_the_whole_module(gan):
    model, optimizers = gan
    torch_bf16.prepare(model, optimizers, "bf16-stochastic")
    average = torch_bf16.EMA(model, 0.5)
    average.update_parameters(model, *optimizers)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.fill_(1.0)
    average.update_parameters(model, *optimizers)
    for part in (average.module.generator, average.module.discriminator):
        assert (part.weight - 1.0).abs().max() < 0.7


def test_accelerate_knows_what_each_optimizer_trains(gan, caplog):
    model, optimizers = gan
    accelerator = accelerate.Accelerator(mixed_precision="bf16-stochastic", cpu=True)
    with caplog.at_level(logging.INFO, logger="accelerate_bf16"):
        model, *prepared = accelerator.prepare(model, *optimizers)
        accelerator.backward(model(torch.randn(4, 8)).square().mean())
        for each in prepared:
            each.step()
    assert "no prepared model" not in caplog.text
    assert optimizers[1].state_dict()["torch_bf16"]["names"][0][0].endswith("discriminator.weight")
