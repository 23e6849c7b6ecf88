"""Whole steps of the Triton kernels, run by Triton's interpreter, against the NumPy oracle.

Triton decides at its import whether it interprets, so that the steps run in a child process.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from bucket_cases import CASES, SIZES, assert_oracle_agrees, id_of, make_bucket

from torch_bf16.backends import choose
from torch_bf16.formats import FORMATS

pytest.importorskip("triton", reason="the Triton backend needs triton")

FIRST_STEPS = (1, 2, 1000)


@pytest.fixture(scope="module")
def interpreted():
    """``interpreted(function, *arguments)`` in a process where Triton interprets."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(int).result(timeout=60)
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=120)


def check(case, offsets=(0,) * len(SIZES), sizes=SIZES, steps=FIRST_STEPS):
    bucket = make_bucket(*case, offsets, sizes=sizes)
    assert_oracle_agrees(bucket, choose(torch.device("cpu"), "triton"), steps, offsets)


@pytest.mark.parametrize("case", CASES, ids=id_of)
def test_steps_equal_the_oracle_bit_for_bit(interpreted, case):
    interpreted(check, case)
