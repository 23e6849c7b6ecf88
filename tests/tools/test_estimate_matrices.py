"""Muon's and Adafactor's rows of an estimate against a small GPT that takes real steps."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from estimated_models import ROWS, allocated
from gpt import GPT, GPTConfig
from ranks import Ranks
from torch.distributed.fsdp import fully_shard

import torch_bf16
from torch_bf16.tools.estimate import optimizers
from torch_bf16.tools.estimate.live import LiveBytes
from torch_bf16.tools.estimate.memory import matrix_step_of, memory
from torch_bf16.tools.estimate.optimizers import optimizer_spec
from torch_bf16.tools.estimate.shapes import shapes_of

TOLERANCE = 0.02
STOCHASTIC, MASTER = "bf16-stochastic", "bf16-fp32-master"


def gpt(width):
    torch.manual_seed(0)
    return GPT(GPTConfig(width=width, layers=2, heads=4, vocabulary=512))


def made(name, width, label, ranks=1):
    precision = ROWS[label]
    model = torch_bf16.cast_model(gpt(width), precision.recipe)
    if ranks > 1:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    options = {"lr": 1e-3, "recipe": precision.recipe, "backend": "cpu"}
    if name == "Muon":
        return model, torch_bf16.Muon(torch_bf16.param_groups(model, muon=True), **options)
    return model, torch_bf16.Adafactor(model.parameters(), **options)


def measured(name, width, label, ranks=1):
    """Bytes that are held by role, most bytes beside them in a step, and bytes sent in it."""
    sent = []

    def operation(way, tensor, *rest):
        sent.extend([tensor.nbytes] if way is dist.isend else [])
        return P2POp(way, tensor, *rest)

    P2POp = dist.P2POp
    model, optimizer = made(name, width, label, ranks)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        sent.clear()
        with LiveBytes() as live, mock.patch.object(dist, "P2POp", operation):
            optimizer.step()
    return allocated(model, optimizer), live.peak, sum(sent)


# Matrices of more and of fewer elements than those that are solved together.
@pytest.mark.parametrize(("width", "label"), [(264, STOCHASTIC), (128, MASTER), (128, STOCHASTIC)])
@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_a_row_holds_what_a_gpt_and_its_step_do(name, width, label):
    real, beside, _ = measured(name, width, label)
    shapes, needs = shapes_of(gpt(width), "GPT"), optimizer_spec(name)
    found = memory(shapes, ROWS[label], needs)
    for role, size in real.items():
        assert getattr(found, role) == pytest.approx(size, rel=TOLERANCE, abs=64), role
    estimated = found.held + matrix_step_of(shapes, ROWS[label], needs, 1).peak
    assert estimated == pytest.approx(sum(real.values()) + beside, rel=TOLERANCE)


@pytest.mark.parametrize(("world", "label"), [(2, MASTER), (3, STOCHASTIC)])
@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_a_rank_s_row_has_its_parts_and_the_matrices_that_it_owns(ranks: Ranks, name, label, world):
    shapes, needs = shapes_of(gpt(264), "GPT"), optimizer_spec(name)
    for rank, (real, beside, sent) in enumerate(ranks(world, measured, name, 264, label, world)):
        found = memory(shapes, ROWS[label], needs, world, rank)
        for role, size in real.items():
            assert getattr(found, role) == pytest.approx(size, rel=TOLERANCE, abs=64), (rank, role)
        step = matrix_step_of(shapes, ROWS[label], needs, world, rank)
        held = sum(real.values())
        assert found.held + step.peak == pytest.approx(held + beside, rel=TOLERANCE), rank
        assert step.sent == pytest.approx(sent, rel=TOLERANCE), rank


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon of its own")
def test_an_option_that_torch_s_own_has_not_changes_nothing(monkeypatch):
    # Many CPUs are slow at products in bf16.
    monkeypatch.setattr(optimizers, "_PROBE", (256, 256))
    found = optimizer_spec("Muon(adamw_eps=1e-9, maximize=True)")
    plain = optimizer_spec("Muon")
    assert (found.rule, found.scratch) == (plain.rule, pytest.approx(plain.scratch, rel=0.01))
