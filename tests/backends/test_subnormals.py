"""Subnormal numbers count in every step, whatever ``torch.set_flush_denormal`` says."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torch_bf16
from torch_bf16.backends import choose, subnormals
from torch_bf16.backends.bucket import Variant
from torch_bf16.backends.certificates import fault_of, fault_of_squares
from torch_bf16.backends.certificates.digests import expected
from torch_bf16.backends.certificates.trial import GROUP, Trial, digests_of
from torch_bf16.backends.cpu import threads
from torch_bf16.backends.host_scalars import HostScalars
from torch_bf16.backends.inputs import StepInputs
from torch_bf16.backends.subnormals import subnormals_kept, subnormals_kept_inside
from torch_bf16.backends.team import torchs_team
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


@pytest.fixture(params=["cpu", "cpu, not x86", "eager"])
def backend(request, monkeypatch):
    if "not x86" in request.param:
        monkeypatch.setattr(threads, "keeping_subnormals", lambda: None)
    return choose(CPU, request.param.split(",")[0])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_has_the_same_bits(backend, name):
    trial = Trial.of(VARIANTS[name])
    planes = flushing(lambda: trial.run(backend, CPU))
    assert digests_of(planes) == expected(trial.variant)


def test_scalars_have_the_same_bits():
    group = {**GROUP, "lr": torch.tensor(1e-39)}

    def scalars():
        source = HostScalars(ADAMW, CPU, [1], [0], [torch.tensor(0.0)])
        (rows,) = source.set([group], StepInputs())
        return rows.table.tobytes()

    assert flushing(scalars) == scalars()


def kept_by_two_threads(small):
    """How many products are not zero before, within and after, and torch's threads within."""
    torch.set_num_threads(2)

    def kept():
        # As integers, which are not flushed where they are counted.
        return int((small * 1.0).view(torch.int32).count_nonzero())

    def work():
        before = kept()
        with subnormals_kept():
            within = kept(), torch.get_num_threads()
        return before, within, kept()

    return flushing(work)


@pytest.mark.parametrize("within", [2, 1], ids=["torch's team", "no team"])
def test_torchs_other_threads_keep_them_and_stay_as_many(within, monkeypatch):
    """Where its team cannot be had, torch computes in this thread alone."""
    if within == 1:
        monkeypatch.setattr(subnormals, "torchs_team", lambda: None)
    elif torchs_team() is None:
        pytest.skip("torch's threads cannot be used here")
    before, small = torch.get_num_threads(), torch.full((1 << 17,), 2.0**-130)
    try:
        # Whose other thread starts while it flushes, and so does that one.
        with ThreadPoolExecutor(1) as executor:
            found = executor.submit(kept_by_two_threads, small).result(60)
    finally:
        torch.set_num_threads(before)
    assert found == (0, (1 << 17, within), 0)


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


def steps_and_swaps(name, recipe, weight, gradients):
    """The weights after some steps, and after each change of mode."""
    parameter, found = torch.nn.Parameter(weight.clone()), []
    optimizer = getattr(torch_bf16, name)([parameter], lr=1e-2, recipe=recipe)
    for parameter.grad in gradients:
        optimizer.step()
    for mode in ("eval", "train", "eval") if hasattr(optimizer, "eval") else ():
        found.append(optimizer.exact_weight(parameter).clone())
        getattr(optimizer, mode)()
    return [each.view(torch.int32) for each in (*found, optimizer.exact_weight(parameter))]


@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])
@pytest.mark.parametrize("name", ["Adafactor", "Muon", "AdamWScheduleFree"])
def test_whole_matrices_and_averages_have_the_same_bits(name, recipe):
    generator = torch.Generator().manual_seed(0)
    weight, *gradients = (
        (torch.randn(64, 64, generator=generator) * 2.0**-133).bfloat16() for _ in range(5)
    )
    run = functools.partial(steps_and_swaps, name, recipe, weight, gradients)
    expected = run()
    assert all(map(torch.equal, flushing(run), expected))


def test_only_the_inside_of_a_generator_keeps_them():
    @subnormals_kept_inside
    def modes(count):
        for _ in range(count):
            yield flushes()

    def work():
        return [(inside, flushes()) for inside in modes(count=2)]

    assert flushing(work) == [(False, True)] * 2
