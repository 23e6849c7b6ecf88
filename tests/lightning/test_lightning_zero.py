"""ZeroRedundancyOptimizer, made by the user and converted by the plugin."""

import lightning_zero as on_ranks
import pytest
import torch


@pytest.mark.parametrize("package", [on_ranks.TRAINER, on_ranks.FABRIC])
def test_zero_redundancy_ends_with_the_bits_of_ddp_by_itself(ranks, package):
    expected, _ = ranks(2, on_ranks.trained, package, on_ranks.adamw)
    for weights in ranks(2, on_ranks.trained, package, on_ranks.zero):
        assert all(map(torch.equal, weights, expected))


def test_what_needs_every_parameter_on_each_rank_is_refused(ranks):
    ranks(2, on_ranks.refused)
