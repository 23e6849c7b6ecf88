"""Released steps where ranks reduce gradients: 1 to 4 processes over gloo."""

import pytest
from release_replica import CASES, SHARDED, run, run_hsdp


@pytest.mark.parametrize("case", [*CASES, *SHARDED])
def test_two_ranks_take_the_steps_of_ordinary_ones(ranks, case):
    ranks(2, run, [case])


def test_one_rank_does(ranks):
    ranks(1, run, ["ddp", "ddp-views", "default-reduction", "resume"])


def test_three_ranks_have_the_bits_of_ddp(ranks):
    ranks(3, run, ["default-reduction", "ddp-wire", "ddp-sums"])


def test_four_ranks_do(ranks):
    ranks(4, run, ["ddp-views", "ddp-no-sync", "resume"])
    ranks(4, run_hsdp)
