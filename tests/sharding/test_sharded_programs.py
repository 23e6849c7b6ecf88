"""Some random programs; ``python tests/proofs/sharded_programs.py`` runs as many as you ask for."""

import pytest
from sharded_programs import WRAPPERS, train


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_random_programs_on_ranks_have_the_bits_of_one_process(ranks, wrapper, seed):
    ranks(2, train, wrapper, seed)
