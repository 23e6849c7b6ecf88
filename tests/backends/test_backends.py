"""Whole steps of every backend against the NumPy oracle, bit for bit."""

import contextlib
import logging
import multiprocessing
import sys
import types

import numba
import numpy as np
import pytest
import torch
from bucket_cases import (
    CASES,
    SIZES,
    assert_oracle_agrees,
    assert_other_bases_stand_in,
    bits,
    id_of,
    inputs_of,
    make_case,
)
from certificate_digests import variants
from every_rule import RULES

from torch_bf16 import BackendUnavailableError, Recipe, backends
from torch_bf16.backends import (
    Bucket,
    KernelInputs,
    Variant,
    choose,
    choose_for,
    cuda_graphs,
    explain,
)
from torch_bf16.backends import eager as eager_backend
from torch_bf16.backends import triton as triton_backend
from torch_bf16.backends.certificates import certificate
from torch_bf16.backends.certificates.digests import expected
from torch_bf16.backends.certificates.trial import Trial
from torch_bf16.formats import BF16_STOCHASTIC, FP32, UINT8
from torch_bf16.numerics import roots
from torch_bf16.optim.adam import AdamW
from torch_bf16.rules import ADAMW

every_backend = pytest.mark.parametrize("backend", ["cpu", "eager"])


@every_backend
@pytest.mark.parametrize("case", CASES, ids=id_of)
def test_steps_equal_the_oracle_bit_for_bit(backend, case):
    offsets = [0] * len(SIZES)
    case = make_case(*case, offsets)
    assert_oracle_agrees(case, choose(torch.device("cpu"), backend), (1, 2, 3, 1000), offsets)


# What the CPU backend compiles for a format is the same for all rules.
CODED = [*((name, "eager") for name, rule in RULES.items() if rule.states), ("adamw", "cpu")]


@pytest.mark.parametrize(("rule", "backend"), [*CODED, ("lion", "cpu"), ("adamw_amsgrad", "cpu")])
def test_every_rule_with_codes_equals_the_oracle_where_gradients_are_no_numbers(rule, backend):
    offsets = [0, 64]
    case = make_case(rule, "int8", torch.bfloat16, offsets, sizes=(64, 192))
    assert_oracle_agrees(case, choose(torch.device("cpu"), backend), (1, 2, 3), offsets)


@every_backend
def test_noise_follows_the_global_index_across_a_block_of_two_to_the_32(backend):
    offsets = [5, 2**31, 2**32 - 2, 3 * 2**32 - 4000]
    case = make_case("adamw", "stochastic", torch.bfloat16, offsets)
    assert_oracle_agrees(case, choose(torch.device("cpu"), backend), (1, 2), offsets)


@every_backend
def test_a_tensor_of_many_chunks_equals_the_oracle(backend, monkeypatch):
    monkeypatch.setattr(eager_backend, "SLICE", 70_000)
    offsets = [7, 2**32 - 40_001]
    case = make_case("adamw", "stochastic", torch.bfloat16, offsets, sizes=(200_001, 70_000))
    assert_oracle_agrees(case, choose(torch.device("cpu"), backend), (1, 2), offsets)


@every_backend
def test_other_base_words_can_stand_in_for_a_buckets(backend):
    assert_other_bases_stand_in(choose(torch.device("cpu"), backend))


def test_the_number_of_threads_does_not_change_a_bit():
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sizes = (1_500_000, 17, 0, 700_000)
            bucket, gradients = make_case(
                "adamw", "stochastic", torch.bfloat16, [0] * 4, sizes=sizes
            )
            choose(torch.device("cpu"), "cpu").load(bucket)(inputs_of(bucket, gradients, 1))
            results.append([bits(t).copy() for each in bucket.planes for p in each for t in p])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def step_and_send(optimizer, parameter, pipe):
    optimizer.step()
    pipe.send(parameter[::1000].float().sum().item())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_steps_after_its_parent_did():
    before = torch.get_num_threads()
    parameter = torch.nn.Parameter(torch.ones(2_000_000, 1, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    optimizer = AdamW([parameter], lr=0.1)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=step_and_send, args=(optimizer, parameter, theirs))
    try:
        torch.set_num_threads(2)
        optimizer.step()
        child.start()
        assert ours.poll(60), "the child did not come back from its step"
        child.join(60)
        assert child.exitcode == 0
        step_and_send(optimizer, parameter, theirs)
        assert ours.recv() == ours.recv()
    finally:
        torch.set_num_threads(before)
        if child.is_alive():
            child.kill()


def test_the_fastest_backend_that_works_is_chosen():
    assert choose(torch.device("cpu")).name == "cpu"
    assert choose(torch.device("meta")).name == "eager"


def test_on_gpus_the_triton_backend_is_chosen_unasked():
    pytest.importorskip("triton", minversion="3.5")
    assert choose(torch.device("cuda")).name == "triton"


def test_the_triton_backend_says_what_it_lacks(monkeypatch):
    monkeypatch.setattr(triton_backend, "_missing", triton_backend._missing.__wrapped__)
    triton = triton_backend.TritonBackend()
    assert "not on mps" in triton.unavailable(torch.device("mps"))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.1.0"))
    reason = triton.unavailable(torch.device("cuda"))
    assert "Triton 3.1.0 was found, but 3.5 is needed" in reason
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.6.0+rocm"))
    assert triton.unavailable(torch.device("cuda")) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    reason = triton.unavailable(torch.device("cuda"))
    assert "Triton 3.6.0+rocm was found, but 3.7 is needed" in reason
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.7.0"))
    assert triton.unavailable(torch.device("cuda")) is None
    knobs = types.SimpleNamespace(runtime=types.SimpleNamespace(interpret=True))
    interpreting = types.SimpleNamespace(__version__="3.7.0", knobs=knobs)
    monkeypatch.setitem(sys.modules, "triton", interpreting)
    assert triton.unavailable(torch.device("cpu")) is None
    assert "unset TRITON_INTERPRET" in triton.unavailable(torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "triton", None)
    reason = triton.unavailable(torch.device("cuda"))
    assert "Triton cannot be imported" in reason
    assert "comes with torch 2.9 (ROCm: 2.12) or newer" in reason
    assert "pip install" not in reason


def test_a_gpu_without_triton_is_told_once_what_is_slow(monkeypatch, caplog):
    monkeypatch.setattr(triton_backend, "_missing", lambda: "Triton cannot be imported")
    backends._automatic.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "torch_bf16"):
            for _ in range(2):
                assert choose(torch.device("cuda")).name == "eager"
    finally:
        backends._automatic.cache_clear()
    (record,) = caplog.records
    assert "triton backend cannot be used (Triton cannot be imported)" in record.getMessage()


@pytest.mark.parametrize(("device", "captured"), [(0, False), (1, True)])
def test_a_capture_is_looked_for_on_the_devices_of_the_parameters(device, captured, monkeypatch):
    here = [0]

    @contextlib.contextmanager
    def on(device):
        before, here[0] = here[0], device.index
        yield
        here[0] = before

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: here[0])
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: here[0] == 1)
    places = torch.device("cpu"), torch.device("cuda", device)
    assert cuda_graphs.capturing(places) == captured


def test_a_gpu_that_emulates_bf16_is_named_once(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    backends._note_emulation.cache_clear()
    variant = Variant(ADAMW, (FP32, FP32, FP32), torch.bfloat16, torch.device("cuda", 0))
    try:
        with caplog.at_level(logging.WARNING, "torch_bf16"):
            for _ in range(2):
                assert choose_for(variant, "eager").name == "eager"
            assert len(caplog.records) == 1
            assert "Tesla T4 (cuda:0) has no arithmetic in bf16" in caplog.text
            monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
            backends._note_emulation.cache_clear()
            choose_for(variant, "eager")
        assert len(caplog.records) == 1
    finally:
        backends._note_emulation.cache_clear()


def test_without_fp64_whole_steps_have_the_same_bits(monkeypatch):
    monkeypatch.setattr(roots, "has_fp64", lambda device: False)
    known = [v for v in variants("adamw") if expected(v) and v.indices == "consecutive"]
    blocks = next(each for each in known if UINT8 in each.formats)
    for variant in (known[0], blocks):
        eager = choose(torch.device("cpu"), "eager")
        assert certificate._load_kernels(eager, Trial.of(variant))() is None


def test_a_requested_backend_that_cannot_work_says_why_and_what_does():
    with pytest.raises(BackendUnavailableError, match=r"cannot run on meta.*Working here: eager"):
        choose(torch.device("meta"), "cpu")
    with pytest.raises(ValueError, match="unknown backend 'tpu'; known backends: cpu, eager"):
        choose(torch.device("cpu"), "tpu")
    reasons = explain(torch.device("cpu"))
    assert reasons["cpu"] is reasons["eager"] is None
    assert "on a CPU only under TRITON_INTERPRET=1" in reasons["triton"]


def test_without_numba_the_eager_backend_steps_and_says_so_once(monkeypatch, caplog):
    from torch_bf16.backends import cpu

    monkeypatch.setitem(sys.modules, "numba", None)
    cpu._missing.cache_clear()
    backends._automatic.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "torch_bf16"):
            for _ in range(2):
                assert choose(torch.device("cpu")).name == "eager"
        assert len(caplog.records) == 1
        assert "; pip install numba" in caplog.text
        with pytest.raises(BackendUnavailableError, match="Numba cannot be imported"):
            choose(torch.device("cpu"), "cpu")
    finally:
        cpu._missing.cache_clear()
        backends._automatic.cache_clear()


def test_a_numba_that_a_replaced_print_breaks_leaves_the_step_to_eager(monkeypatch, caplog):
    from torch_bf16.backends import cpu

    class Finder:
        def find_spec(self, name, path, target=None):
            if name == "numba":
                raise AttributeError("module 'util.misc' has no attribute 'print'")

    monkeypatch.delitem(sys.modules, "numba")
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    cpu._missing.cache_clear()
    backends._automatic.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "torch_bf16"):
            assert choose(torch.device("cpu")).name == "eager"
        assert "AttributeError: module 'util.misc' has no attribute 'print'" in caplog.text
        assert "import numba before it does" in caplog.text
    finally:
        cpu._missing.cache_clear()
        backends._automatic.cache_clear()


def test_numba_without_its_compiler_leaves_the_step_to_eager(monkeypatch):
    from torch_bf16.backends import cpu

    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    cpu._missing.cache_clear()
    backends._automatic.cache_clear()
    try:
        assert choose(torch.device("cpu")).name == "eager"
        with pytest.raises(BackendUnavailableError, match="unset NUMBA_DISABLE_JIT"):
            choose(torch.device("cpu"), "cpu")
    finally:
        cpu._missing.cache_clear()
        backends._automatic.cache_clear()


def test_a_place_without_a_writable_cache_still_compiles(monkeypatch):
    from torch_bf16.backends.cpu import kernel

    real, kernels = numba.njit, []

    def njit(*given, **options):
        # Parts of a kernel are compiled by the one that was imported.
        kernels.append(options.get("cache", False))
        if kernels[-1]:
            raise RuntimeError("cannot cache function: no locator available")
        return real(*given, **options)

    monkeypatch.setattr(numba, "njit", njit)
    variant = make_case("sgd", "nearest", torch.bfloat16, [0], sizes=(3,))[0].variant
    kernel.compile_step.__wrapped__(variant, 3)
    assert kernels == [True, True, False]


def test_recipes_reach_the_kernel_as_formats():
    recipe = Recipe("mixed", weights="bf16+fp32", exp_avg="bf16_stochastic", exp_avg_sq="fp32")
    parameter = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    optimizer = AdamW([parameter], recipe=recipe)
    optimizer.step()
    state = optimizer.state[parameter]
    assert {key: value.dtype for key, value in state.items()} == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.float32,
        "master": torch.float32,
    }


@pytest.mark.parametrize(("device", "size"), [("cpu", 2**20), ("meta", 2**24)])
def test_slices_of_the_eager_backend_are_larger_where_operations_are_launched(
    monkeypatch, device, size
):
    slices = []
    monkeypatch.setattr(eager_backend, "_update", lambda *_: (None, None))
    monkeypatch.setattr(eager_backend, "_encode", lambda *inputs: slices.append(inputs[-2:]))
    device, numel = torch.device(device), 2 * size + 3
    variant = Variant(RULES["sgd"], (BF16_STOCHASTIC,), torch.bfloat16, device)
    gradient = torch.empty(1, dtype=torch.bfloat16, device=device).expand(numel)
    if device.type == "cpu":
        gradient = gradient.contiguous()
    bucket = Bucket.of(variant, [((gradient,),)], [(numel, 0, numel, numel)], ["p"], 0)
    choose(device, "eager").load(bucket)(KernelInputs([gradient], None))
    assert slices == [(0, size), (size, 2 * size), (2 * size, numel)]
