"""What LLVM makes of the kernels for CPUs, which no comparison of results would show."""

import re

import numba
import pytest
import torch
from bucket_cases import (
    HYPER,
    assert_oracle_agrees,
    beside,
    bits,
    inputs_of,
    make_case,
    sizes_of,
)

from torch_bf16.backends import choose
from torch_bf16.backends.cpu import kernel


@pytest.fixture(params=["stochastic", "bf16+8", "int8"])
def compiled(request, monkeypatch):
    """AdamW's kernel as LLVM's text; one read from the cache would have none."""
    njit = numba.njit
    monkeypatch.setattr(numba, "njit", lambda *given, cache=False, **how: njit(*given, **how))
    sizes = sizes_of(request.param)
    variant = make_case("adamw", request.param, torch.bfloat16, [0] * len(sizes))[0].variant
    n_scalars = len(variant.rule.scalars(variant.rule.options(HYPER), 1, 1.0))
    run = kernel.compile_step.__wrapped__(variant, n_scalars)
    (text,) = run.compiled.inspect_llvm().values()
    return text


def test_a_kernel_calls_none_of_its_parts_and_takes_roots_in_vectors(compiled):
    # A part that is called is linked by its symbol: in the process that compiles it, that may be
    # scalar code from before it knew its caller.
    body = re.search(r"define [^\n]*run_adamw_.*?\n}\n", compiled, re.S).group()
    called = set(re.findall(r"call [^@\n]*@([\w.]+)", body))
    assert {name for name in called if not name.startswith(("llvm.", "NRT_"))} <= {"sqrtf"}
    assert re.search(r"@llvm\.sqrt\.v\d+f32", body)


@pytest.mark.parametrize("layout", ["stochastic", "bf16+8", "bf16+fp32"])
def test_elements_left_over_at_either_end_are_updated_alone(layout):
    """Pairs start at even global indices, in strips of 64; widths of runs may be odd, too."""
    sizes = (1, 1, 2, 2, 127, 128, 129, 130, 257, 45)
    offsets = [0, 7, 0, 7, 7, 7, 2**32 - 65, 1, 2**33 + 1, 3]
    runs = [(max(size, 1), max(size, 1)) for size in sizes[:-1]] + [(9, 40)]
    case = make_case("adamw", layout, torch.bfloat16, offsets, sizes, place=beside, runs=runs)
    assert_oracle_agrees(case, choose(torch.device("cpu"), "cpu"), (1, 2), offsets, runs)


def test_blocks_may_lie_at_odd_addresses():
    sizes, offsets = (64, 320, 4160), [0, 64, 2**33 + 128]
    case = make_case("adamw", "int8", torch.bfloat16, offsets, sizes, place=beside)
    assert_oracle_agrees(case, choose(torch.device("cpu"), "cpu"), (1, 2), offsets)


@pytest.mark.parametrize("layout", ["fp32", "stochastic"])
def test_a_gradient_may_be_the_very_memory_of_the_weight(layout):
    """As where an average is updated with itself."""
    results = []
    for backend in ("cpu", "eager"):
        gradient = torch.float32 if layout == "fp32" else torch.bfloat16
        bucket, _ = make_case("average", layout, gradient, [0], (1000,))
        gradients = [bucket.planes[0][0][0]]
        choose(torch.device("cpu"), backend).load(bucket)(inputs_of(bucket, gradients, 1))
        results.append(bits(gradients[0]))
    assert (results[0] == results[1]).all()
