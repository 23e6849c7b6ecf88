"""Subnormal numbers count in every step, whatever ``torch.set_flush_denormal`` says."""

import pytest
import torch

from torch_bf16.backends import choose
from torch_bf16.backends.bucket import Variant
from torch_bf16.backends.certificates import fault_of, fault_of_squares
from torch_bf16.backends.certificates.digests import expected
from torch_bf16.backends.certificates.trial import Trial, digests_of
from torch_bf16.formats import BF16_PLUS_16, FP32
from torch_bf16.rules import ADAMW, CAUTIOUS_ADAMW

CPU = torch.device("cpu")
VARIANTS = {
    rule.name: Variant(rule, (BF16_PLUS_16, FP32, FP32), torch.bfloat16, CPU)
    for rule in (ADAMW, CAUTIOUS_ADAMW)
}


def flushes():
    smallest = 5e-324
    return smallest * 1.0 == 0.0


def flushing(work):
    """The result of some work in a thread that flushes subnormal numbers, and goes on to do so."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        result = work()
        assert flushes()
    finally:
        torch.set_flush_denormal(False)
    return result


@pytest.fixture(params=["cpu", "eager"])
def backend(request):
    return choose(CPU, request.param)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_has_the_same_bits(backend, name):
    trial = Trial.of(VARIANTS[name])
    planes = flushing(lambda: trial.run(backend, CPU))
    assert digests_of(planes) == expected(trial.variant)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_sum_of_squares_has_the_same_bits(backend, dtype):
    # The kernel squares in fp64, torch in fp32: there the squares are subnormal.
    scale = {"cpu": 2.0**-130, "eager": 2.0**-73}[backend.name]
    tensors = [(torch.randn(5000, dtype=torch.float64) * scale).to(dtype)]
    expected_sum = float(backend.squares(tensors))
    assert expected_sum > 0.0
    assert float(flushing(lambda: backend.squares(tensors))) == expected_sum


@pytest.mark.usefixtures("fresh")
def test_a_trial_passes_and_so_leaves_no_fault_on_disk():
    for backend in choose(CPU, "cpu"), choose(CPU, "eager"):
        assert flushing(lambda backend=backend: fault_of(backend, VARIANTS["adamw"])) is None
    assert flushing(lambda: fault_of_squares(choose(CPU, "cpu"), CPU, torch.float32)) is None
