"""Gradients of which each rank holds a part, over gloo."""

import pytest
import sharded_gradients as runs


@pytest.mark.parametrize("wide", [True, False], ids=["even", "a-rank-without-elements"])
def test_an_overflow_in_one_ranks_part_is_one_for_all(ranks, wide):
    ranks(3, runs.run_overflow_on_one_rank, wide)
