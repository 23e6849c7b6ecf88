"""ZeroRedundancyOptimizer ends with the bits of DDP by itself, whichever rank steps for what."""

from pathlib import Path

import pytest
from ranks import run_ranks
from sharded_training import RECIPES

SCRIPT = Path(__file__).parents[1] / "support" / "zero_training.py"
# Not imported from there: torch's import of ZeroRedundancyOptimizer warns.
WORLD, WAYS = 3, ("class", "bucket views", "converted", "named", "own step")


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """What each of the processes printed; all of them ended well."""
    return run_ranks(SCRIPT, WORLD, tmp_path_factory.mktemp("zero"), seconds=200)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", WAYS)
def test_weights_states_and_resumed_runs_equal_those_of_ddp(logs, way, recipe):
    assert all(f"same {way} {recipe}\n" in text for text in logs)
