"""Whole steps of the Triton kernels, run by Triton's interpreter, against the NumPy oracle.

The steps run in a child process: see the fixture ``interpreted``.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from bucket_cases import (
    BLOCKED,
    CASES,
    EVERY_RULE_AND_FORMAT,
    SIZES,
    assert_oracle_agrees,
    assert_other_bases_stand_in,
    beside,
    bits,
    id_of,
    inputs_of,
    make_case,
    poison,
)
from optimizer_cases import (
    assert_same,
    every_pair,
    make_optimizer,
    make_parameters,
    snapshot,
    take_steps,
)

from torch_bf16 import backends

pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")

AT_ZERO = (0,) * len(SIZES)


def few_blocks(layout, whole):
    """Tails of one element or of one block of codes, one behind whole blocks of 1024 elements."""
    tail = 64 if layout in BLOCKED else 1
    return tail, 1024 * whole + tail


def run_and_compare(case, offsets=AT_ZERO, steps=(1, 2), sizes=None, change=None, **options):
    """Compares with the oracle, and returns how many blocks took which path, by ``FULL``."""
    from torch_bf16.backends.triton import kernel

    paths, block = Counter(), kernel._block

    def counting_block(*arguments):
        paths[arguments[-1]] += 1
        return block(*arguments)

    case = make_case(*case, offsets, sizes=sizes, **options)
    if change:
        change(*case)
    kernel._block = counting_block
    try:
        backend = backends.choose(torch.device("cpu"), "triton")
        assert_oracle_agrees(case, backend, steps, offsets)
    finally:
        kernel._block = block
    return paths


@pytest.mark.parametrize("case", CASES, ids=id_of)
def test_steps_equal_the_oracle_bit_for_bit(interpreted, case):
    paths = interpreted(run_and_compare, case, (0, 0), (1, 2, 1000), few_blocks(case[1], 2))
    assert paths == {True: 3 * 2, False: 3 * 2}


@pytest.mark.parametrize("case", EVERY_RULE_AND_FORMAT, ids=id_of)
def test_every_rule_with_every_format_equals_the_oracle(interpreted, case):
    # Each block takes the interpreter as long as another; tensors of other sizes come below.
    interpreted(run_and_compare, case, (0, 0), (1, 2), few_blocks(case[1], 1))


def with_poison(case):
    return run_and_compare(case, steps=(1, 2), change=poison)


@pytest.mark.parametrize("layout", ["stochastic", "master", "bf16+fp32", "fp32"])
def test_no_special_number_in_any_plane_is_lost(interpreted, layout):
    interpreted(with_poison, ("adamw", layout, torch.bfloat16))


def with_unaligned_tensors(case):
    return run_and_compare(case, place=beside)


def with_one_unaligned_plane(case):
    def move_one(_, gradients):
        gradients[:] = [beside(each) for each in gradients]

    return run_and_compare(case, change=move_one)


@pytest.mark.parametrize("layout", ["stochastic", "master"])
@pytest.mark.parametrize("place", [with_unaligned_tensors, with_one_unaligned_plane])
def test_unaligned_tensors_equal_the_oracle(interpreted, layout, place):
    assert set(interpreted(place, ("adamw", layout, torch.bfloat16))) == {False}


@pytest.mark.parametrize(
    ("offsets", "whole"),
    [
        # Not a multiple of eight, or across a block of 2**32: masked. Else whole, near its end too.
        ((5, 2**31, 2**32 - 2, 3 * 2**32 - 4000), {False}),
        ((0, 0, 2**32 - 8, 2**32 - 8192), {True, False}),
        ((0, 0, 2**33, 2**32 - 4104), {False}),
    ],
)
def test_noise_follows_the_global_index_across_a_block_of_two_to_the_32(
    interpreted, offsets, whole
):
    case = ("adamw", "stochastic", torch.bfloat16)
    assert set(interpreted(run_and_compare, case, offsets)) == whole


def test_a_tensor_of_many_chunks_equals_the_oracle(interpreted):
    case = ("adamw", "stochastic", torch.bfloat16)
    sizes = (20_001, 0, 12_000)  # three chunks and two
    interpreted(run_and_compare, case, (0, 7, 2**32 - 30_000), (1, 2), sizes)


def other_bases_stand_in():
    assert_other_bases_stand_in(backends.choose(torch.device("cpu"), "triton"))


def test_other_base_words_can_stand_in_for_a_buckets(interpreted):
    interpreted(other_bases_stand_in)


class Far:
    """A tensor as if it stood at the end of one that is ``distance`` elements longer."""

    def __init__(self, tensor, distance):
        self.address = tensor.data_ptr() - distance * tensor.itemsize

    def data_ptr(self):
        return self.address


def end_of_a_huge_tensor(distance):
    case, size = ("adamw", "master", torch.bfloat16), 4097
    near, near_gradients = make_case(*case, [distance], sizes=(size,))
    here, gradients = make_case(*case, [0], sizes=(size,))
    planes = [[tuple(Far(t, distance) for t in each) for each in here.planes[0]]]
    huge = replace(here, planes=planes, numels=here.numels + distance)
    triton = backends.choose(torch.device("cpu"), "triton")
    kernel = triton.load(huge)
    kernel._programs, kernel._chunks = 1, kernel._chunks[-1:]
    kernel(inputs_of(huge, [Far(gradients[0], distance)], 1))
    triton.load(near)(inputs_of(near, near_gradients, 1))
    for ours, theirs in zip(here.planes[0], near.planes[0], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(bits(one), bits(other))


@pytest.mark.parametrize("distance", [2**31, 2**33 + 2**13])
def test_elements_beyond_two_to_the_31_are_addressed(interpreted, distance):
    interpreted(end_of_a_huge_tensor, distance)


def optimizers_agree(name, recipe):
    optimizers = [
        make_optimizer(name, recipe, backend, make_parameters().values())
        for backend in ("triton", "eager")
    ]
    for optimizer in optimizers:
        take_steps(optimizer, range(2))
    assert_same(*map(snapshot, optimizers))


@every_pair
def test_optimizers_step_to_the_same_bits_as_with_eager(interpreted, name, recipe):
    interpreted(optimizers_agree, name, recipe)
