"""Whole steps of every backend against the NumPy oracle, bit for bit."""

import logging
import multiprocessing
import sys

import numpy as np
import oracle
import pytest
import torch

from torch_bf16 import BackendUnavailableError, Recipe, backends
from torch_bf16.backends import Bucket, Variant, choose, explain
from torch_bf16.backends import eager as eager_backend
from torch_bf16.counter_rng import stream_base, tensor_key
from torch_bf16.formats import get_format
from torch_bf16.optim import AdamW
from torch_bf16.rules import RULES

SIZES = (0, 1, 3, 4097)
UNSIGNED = {torch.bfloat16: np.uint16, torch.int16: np.int16, torch.float32: np.float32}
HYPER = {
    "lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "maximize": False,
    "momentum": 0.9, "dampening": 0.1, "nesterov": True, "scale": 0.75,
}  # fmt: skip

# weights / first moment / second moment; a rule with fewer states uses the first ones.
LAYOUTS = {
    "stochastic": ("bf16_stochastic", "bf16_nearest", "bf16_stochastic"),
    "master": ("remainder16", "fp32", "fp32"),
    "master32": ("master32", "bf16_stochastic", "fp32"),
    "nearest": ("bf16_nearest", "bf16_nearest", "bf16_nearest"),
    "fp32": ("fp32", "fp32", "fp32"),
}
CASES = [
    *(("adamw", layout, torch.bfloat16) for layout in LAYOUTS),
    ("adamw", "stochastic", torch.float32),
    ("adamw", "fp32", torch.float32),
    ("adam", "stochastic", torch.bfloat16),
    ("adam", "master", torch.float32),
    ("sgd", "stochastic", torch.bfloat16),
    ("sgd_momentum", "master", torch.bfloat16),
    ("sgd_nesterov", "stochastic", torch.bfloat16),
]
every_backend = pytest.mark.parametrize("backend", backends.BACKENDS)


def id_of(case):
    return "-".join(str(part).removeprefix("torch.") for part in case)


def make_bucket(rule_name, layout, gradient, offsets, sizes=SIZES, seed=7):
    """A bucket of random tensors with special values among them, at step 1, zero states."""
    rule = RULES[rule_name]
    formats = [get_format(name) for name in LAYOUTS[layout][: 1 + len(rule.states)]]
    rng = np.random.default_rng(3)
    planes, gradients = [], []
    for size in sizes:
        weights = rng.standard_normal(size).astype(np.float32)
        weights[1:3] = [0.0, -0.0][: max(0, min(size, 3) - 1)]
        tensors = [[torch.zeros(size, dtype=p.dtype) for p in f.planes] for f in formats]
        r = torch.full((size,), 0x8000, dtype=torch.int32)
        formats[0].encode(torch.from_numpy(weights), r, tensors[0])
        planes.append([tuple(each) for each in tensors])
        g = torch.from_numpy(rng.standard_normal(size).astype(np.float32))
        if size > 100:
            g[:6] = torch.tensor([np.inf, -np.inf, np.nan, 3e38, 1e-40, 0.0])
        gradients.append(g.to(gradient))
    n = len(sizes)
    variant = Variant(rule, formats[0], tuple(formats[1:]), gradient, torch.device("cpu"))
    bases = [
        [stream_base(seed, tensor_key(f"p{number}"), draw.stream) for draw in variant.draws]
        for number in range(n)
    ]
    return Bucket(
        variant=variant,
        planes=planes,
        numels=np.array(sizes, np.int64),
        offsets=np.array(offsets, np.int64),
        bases=np.array(bases, np.uint32).reshape(n, -1, 2),
        gradients=gradients,
        rows=np.zeros(n, np.int64),
    )


def set_step(bucket, step):
    scale = HYPER["scale"]
    row = bucket.variant.rule.scalars(HYPER, step, scale)
    bucket.steps = np.full(len(bucket.numels), step, np.int64)
    bucket.scalars = np.array([row], np.float64).astype(np.float32)


def bits(tensor):
    raw = tensor.contiguous()
    raw = raw.view(torch.int16 if raw.itemsize == 2 else torch.int32).numpy()
    return raw


def oracle_planes(tensors):
    """Copies in the oracle's dtypes: bf16 as uint16."""
    unsigned = {torch.bfloat16: np.uint16, torch.int16: np.int16, torch.float32: np.float32}
    return tuple(bits(t).copy().view(unsigned[t.dtype]) for t in tensors)


def assert_oracle_agrees(bucket, backend, steps, offsets):
    rule = bucket.variant.rule
    roles = ["weight", *(state.name for state in rule.states)]
    formats = dict(zip(roles, (f.name for f in bucket.variant.formats), strict=True))
    expected = [
        dict(zip(roles, (oracle_planes(each) for each in planes), strict=True))
        for planes in bucket.planes
    ]
    for step in steps:
        set_step(bucket, step)
        backend.run(bucket)
        for number, planes in enumerate(bucket.planes):
            (gradient,) = oracle_planes([bucket.gradients[number]])
            expected[number] = oracle.optimizer_step(
                rule.name, formats, expected[number], gradient, HYPER,
                seed=7, name=f"p{number}", step=step, start=offsets[number],
            )  # fmt: skip
            for role, tensors in zip(roles, planes, strict=True):
                for want, got in zip(expected[number][role], tensors, strict=True):
                    want = np.asarray(want)
                    raw = want.view(np.int16 if want.itemsize == 2 else np.int32)
                    got_bits = bits(got)
                    # Which NaN an operation makes is the processor's choice; that it is one, is
                    # not.
                    nan = np.isnan(got.float().numpy()) if got.is_floating_point() else False
                    is_nan = (
                        np.isnan(oracle.bf16_to_fp32(want))
                        if want.dtype == np.uint16
                        else (np.isnan(want) if want.dtype == np.float32 else False)
                    )
                    np.testing.assert_array_equal(nan, is_nan)
                    same = (raw == got_bits) | nan
                    if got.dtype == torch.int16:
                        same |= np.isnan(tensors[0].float().numpy())
                    assert same.all(), (role, number, step, np.flatnonzero(~same)[:5])


@every_backend
@pytest.mark.parametrize("case", CASES, ids=id_of)
def test_steps_equal_the_oracle_bit_for_bit(backend, case):
    offsets = [0] * len(SIZES)
    bucket = make_bucket(*case, offsets)
    assert_oracle_agrees(bucket, choose(torch.device("cpu"), backend), (1, 2, 3, 1000), offsets)


@every_backend
def test_noise_follows_the_global_index_across_a_block_of_two_to_the_32(backend):
    offsets = [5, 2**31, 2**32 - 2, 3 * 2**32 - 4000]
    bucket = make_bucket("adamw", "stochastic", torch.bfloat16, offsets)
    assert_oracle_agrees(bucket, choose(torch.device("cpu"), backend), (1, 2), offsets)


@every_backend
def test_a_tensor_of_many_chunks_equals_the_oracle(backend, monkeypatch):
    monkeypatch.setattr(eager_backend, "SLICE", 70_000)
    bucket = make_bucket("adamw", "stochastic", torch.bfloat16, [0, 0], sizes=(200_001, 70_000))
    assert_oracle_agrees(bucket, choose(torch.device("cpu"), backend), (1, 2), [0, 0])


def test_the_number_of_threads_does_not_change_a_bit():
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sizes = (1_500_000, 17, 0, 700_000)
            bucket = make_bucket("adamw", "stochastic", torch.bfloat16, [0] * 4, sizes=sizes)
            set_step(bucket, 1)
            choose(torch.device("cpu"), "cpu").run(bucket)
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
    try:
        torch.set_num_threads(2)
        optimizer.step()
        child = context.Process(target=step_and_send, args=(optimizer, parameter, theirs))
        child.start()
        assert ours.poll(60), "the child did not come back from its step"
        child.join(60)
        assert child.exitcode == 0
        step_and_send(optimizer, parameter, theirs)
        assert ours.recv() == ours.recv()
    finally:
        torch.set_num_threads(before)


def test_the_fastest_backend_that_works_is_chosen():
    assert choose(torch.device("cpu")).__name__.endswith("backends.cpu")
    assert choose(torch.device("meta")).__name__.endswith("backends.eager")


def test_a_requested_backend_that_cannot_work_says_why_and_what_does():
    with pytest.raises(BackendUnavailableError, match=r"cannot run on meta.*Working here: eager"):
        choose(torch.device("meta"), "cpu")
    with pytest.raises(ValueError, match="unknown backend 'tpu'; known backends: cpu, eager"):
        choose(torch.device("cpu"), "tpu")
    assert explain(torch.device("cpu")) == {"cpu": None, "eager": None}


def test_without_numba_the_eager_backend_steps_and_says_so_once(monkeypatch, caplog):
    from torch_bf16.backends import cpu

    monkeypatch.setitem(sys.modules, "numba", None)
    cpu._missing.cache_clear()
    backends._automatic.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "torch_bf16"):
            for _ in range(2):
                assert choose(torch.device("cpu")).__name__.endswith("backends.eager")
        assert len(caplog.records) == 1
        assert 'pip install "torch-bf16[cpu]"' in caplog.text
        with pytest.raises(BackendUnavailableError, match="Numba cannot be imported"):
            choose(torch.device("cpu"), "cpu")
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
        assert choose(torch.device("cpu")).__name__.endswith("backends.eager")
        with pytest.raises(BackendUnavailableError, match="unset NUMBA_DISABLE_JIT"):
            choose(torch.device("cpu"), "cpu")
    finally:
        cpu._missing.cache_clear()
        backends._automatic.cache_clear()


def test_a_place_without_a_writable_cache_still_compiles(monkeypatch):
    from torch_bf16.backends.cpu import kernel

    real, calls = kernel._jit, []

    def jit(*args, **kwargs):
        calls.append(kwargs)
        if kwargs.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(*args, **kwargs)

    monkeypatch.setattr(kernel, "_jit", jit)
    variant = make_bucket("sgd", "nearest", torch.bfloat16, [0], sizes=(3,)).variant
    kernel.compile_step.__wrapped__(variant, 3)
    assert calls[-2].get("cache")
    assert not calls[-1].get("cache")


def test_recipes_reach_the_kernel_as_formats():
    recipe = Recipe("mixed", weights="master32", exp_avg="bf16_stochastic", exp_avg_sq="fp32")
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
