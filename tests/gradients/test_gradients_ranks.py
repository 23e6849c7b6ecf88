"""Accumulation and release where gradients are reduced: DDP and FSDP2, two processes over gloo."""

import pytest
from gradients_replica import CASES, run


@pytest.mark.parametrize("case", CASES)
def test_sums_and_replicas_are_right(ranks, case):
    ranks(2, run, case)
