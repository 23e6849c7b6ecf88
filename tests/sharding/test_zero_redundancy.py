"""ZeroRedundancyOptimizer ends with the bits of DDP by itself, whichever rank steps for what."""

from itertools import cycle, product

import pytest
from sharded_training import RECIPES
from zero_training import WAYS, refusals, run, unnamed

# The other ways differ from the first in what makes the optimizer, and not in how it keeps masters.
BOTH = ("converted", "own step")
OTHERS = [way for way in WAYS if way not in BOTH]


@pytest.mark.parametrize(
    ("way", "recipe"),
    [*product(BOTH, [*RECIPES, "bytes"]), *zip(OTHERS, cycle(RECIPES), strict=False)],
)
def test_weights_states_and_resumed_runs_equal_those_of_ddp(ranks, way, recipe):
    ranks(3, run, way, recipe)


def test_steps_inside_the_backward_pass_are_refused(ranks):
    ranks(3, refusals)


def test_what_other_ranks_step_is_no_average_of_the_program(ranks):
    ranks(2, unnamed)
