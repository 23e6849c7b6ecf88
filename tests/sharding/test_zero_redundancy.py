"""ZeroRedundancyOptimizer ends with the bits of DDP by itself, whichever rank steps for what."""

import pytest
from sharded_training import RECIPES
from zero_training import WAYS, refusals, run


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", WAYS)
def test_weights_states_and_resumed_runs_equal_those_of_ddp(ranks, way, recipe):
    ranks(3, run, way, recipe)


def test_steps_inside_the_backward_pass_are_refused(ranks):
    ranks(3, refusals)
