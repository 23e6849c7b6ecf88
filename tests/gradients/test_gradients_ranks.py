"""Accumulation and release where gradients are reduced: DDP and FSDP2, two processes over gloo."""

import checkpointed_passes
import pytest
from gradients_replica import CASES, run, run_in_two_groups


@pytest.mark.parametrize("case", CASES)
def test_sums_and_replicas_are_right(ranks, case):
    ranks(2, run, case)


def test_groups_have_fp32_sums_of_their_own(ranks):
    ranks(4, run_in_two_groups)


def test_a_pass_within_a_pass_changes_no_fp32_sum_under_ddp(ranks):
    ranks(2, checkpointed_passes.run_nested_passes)


def test_a_pass_that_fails_leaves_fp32_sums_under_ddp_as_torch_does(ranks):
    ranks(2, checkpointed_passes.run_failed_pass)
