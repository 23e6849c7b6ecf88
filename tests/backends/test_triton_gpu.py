"""The Triton kernels on a GPU against the NumPy oracle: `pytest -m gpu`."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from bucket_cases import (
    CASES,
    EVERY_RULE_AND_FORMAT,
    SIZES,
    assert_oracle_agrees,
    beside,
    bits,
    id_of,
    inputs_of,
    make_case,
    poison,
)
from gpu_marks import gpus

from torch_bf16 import backends
from torch_bf16.tools.selftest.steps import waiting_is_an_error

pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")

pytestmark = gpus()
AT_ZERO = (0,) * len(SIZES)
GPU = torch.device("cuda")
STOCHASTIC = ("adamw", "stochastic", torch.bfloat16)


def run_and_compare(case, offsets=AT_ZERO, steps=(1, 2), sizes=None, change=None, **options):
    case = make_case(*case, offsets, sizes=sizes, device="cuda", **options)
    if change:
        change(*case)
    assert_oracle_agrees(case, backends.choose(GPU, "triton"), steps, offsets)


@pytest.mark.parametrize("case", CASES, ids=id_of)
def test_steps_equal_the_oracle_bit_for_bit(case):
    run_and_compare(case, steps=(1, 2, 3, 1000))


@pytest.mark.parametrize("case", EVERY_RULE_AND_FORMAT, ids=id_of)
def test_every_rule_with_every_format_equals_the_oracle(case):
    run_and_compare(case)


@pytest.mark.parametrize("layout", ["stochastic", "master", "bf16+fp32", "fp32"])
def test_no_special_number_in_any_plane_is_lost(layout):
    run_and_compare(("adamw", layout, torch.bfloat16), change=poison)


@pytest.mark.parametrize("layout", ["stochastic", "master"])
def test_unaligned_tensors_equal_the_oracle(layout):
    run_and_compare(("adamw", layout, torch.bfloat16), place=beside)


@pytest.mark.parametrize(
    "offsets", [(5, 2**31, 2**32 - 2, 3 * 2**32 - 4000), (0, 0, 2**32 - 8, 2**32 - 8192)]
)
def test_noise_follows_the_global_index_across_a_block_of_two_to_the_32(offsets):
    run_and_compare(STOCHASTIC, offsets)


def test_a_tensor_of_many_chunks_equals_the_oracle():
    run_and_compare(STOCHASTIC, (0, 7, 2**32 - 30_000), sizes=(1_000_001, 0, 200_000))


def test_a_tensor_of_more_than_two_to_the_31_elements_equals_eager_at_both_ends():
    size, ends = 2**31 + 5_000, (slice(0, 10_000), slice(2**31 - 5_000, None))
    bucket, _ = make_case("sgd", "stochastic", torch.bfloat16, [0], sizes=(3,), device="cuda")
    weights = torch.ones(size, dtype=torch.bfloat16, device="cuda")
    gradient = torch.full_like(weights, 0.3)
    results = []
    bucket = replace(bucket, planes=[[(weights,)]], numels=np.array([size]))
    for name in ("eager", "triton"):
        weights.fill_(1.0)
        backends.choose(GPU, name).load(bucket)(inputs_of(bucket, [gradient], 1))
        results.append([bits(weights[end]).copy() for end in ends])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_nothing_is_compiled_after_the_first_step():
    from torch_bf16.backends.triton.kernel import step

    case = make_case(*STOCHASTIC, AT_ZERO, device="cuda")
    kernel, compiled = backends.choose(GPU, "triton").load(case[0]), []
    for number in (1, 2, 15, 16, 17, 1 << 20):
        kernel(inputs_of(*case, number))
        compiled.append(len(step.device_caches[torch.cuda.current_device()][0]))
    assert len(set(compiled)) == 1


def test_a_step_does_not_wait_for_the_device():
    case = make_case(*STOCHASTIC, AT_ZERO, device="cuda")
    kernel = backends.choose(GPU, "triton").load(case[0])
    kernel(inputs_of(*case, 1))
    with waiting_is_an_error():
        kernel(inputs_of(*case, 2))
