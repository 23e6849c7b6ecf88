"""ZeroRedundancyOptimizer, given to ``prepare`` as torch makes it."""

import accelerate_zero as on_ranks
import pytest


@pytest.mark.parametrize("mode", ["bf16-stochastic", "bf16-fp32-master"])
def test_zero_redundancy_ends_with_the_bits_of_ddp_by_itself(ranks, mode):
    ranks(2, on_ranks.trained, mode)


def test_what_needs_every_parameter_on_each_rank_is_refused(ranks):
    ranks(2, on_ranks.refused)
