"""Two replicas over gloo with different seeds end bit-identical."""

from __future__ import annotations

import pytest
import torch
from ddp_replica import RUNS, evaluated, trained
from lightning_models import differences

STEPS = 50
MASTERS = [package for package, mode in RUNS if mode == "bf16-fp32-master"]


@pytest.mark.parametrize(("package", "mode"), RUNS)
def test_replicas_that_start_differently_are_bit_identical_after_50_steps(ranks, package, mode):
    (first, one), (second, other) = ranks(2, trained, package, mode, STEPS, 1e-2)
    assert not torch.equal(first, second)
    assert float(one["state 0 step"]) == STEPS
    assert one["state 1 remainder16"].any()
    assert differences(one, other) == []


@pytest.mark.parametrize("package", MASTERS)
def test_masters_start_from_the_fp32_weights_of_rank_0(ranks, package):
    """A step that changes no weight shows what they started from."""
    (fp32, one), (_, other) = ranks(2, trained, package, "bf16-fp32-master", 1, 0.0)
    assert differences(one, other) == []
    weight = next(value for name, value in one.items() if name.endswith("0.weight"))
    master = (weight.view(torch.int16).int() << 16) + one["state 0 remainder16"].view(
        torch.int16
    ).int()
    assert torch.equal(master.view(torch.float32), fp32)


@pytest.mark.parametrize("idle", [False, True])
def test_an_evaluation_leaves_masters_as_they_were(ranks, idle):
    """Lightning sends the weights to all ranks for it, also those of a weight without a step."""
    for made, trained_to, evaluated_to in ranks(2, evaluated, MASTERS[0], idle):
        assert torch.equal(made, trained_to) == idle
        assert torch.equal(trained_to, evaluated_to)
