"""Exact masters keep every bit through whole state dicts of sharded models, in four processes."""

from pathlib import Path

import pytest
from ranks import run_ranks
from sharded_checkpoints import WHOLE, WORLD

SCRIPT = Path(__file__).with_name("sharded_checkpoints.py")


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """What each of the processes printed; all of them ended well."""
    return run_ranks(SCRIPT, WORLD, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.id)
def test_a_whole_state_dict_has_every_bit_pattern_and_loads_again(logs, case):
    assert all(f"whole {case.id}\n" in text for text in logs)
