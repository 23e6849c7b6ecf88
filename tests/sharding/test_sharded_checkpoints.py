"""Checkpoints of sharded models in four processes: whole, asynchronous, and loaded elsewhere."""

from pathlib import Path

import pytest
from ranks import run_ranks
from sharded_checkpoints import WHOLE, WORLD

SCRIPT = Path(__file__).parents[1] / "support" / "sharded_checkpoints.py"


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """What each of the processes printed; all of them ended well."""
    return run_ranks(SCRIPT, WORLD, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.id)
def test_a_whole_state_dict_has_every_bit_pattern_and_loads_again(logs, case):
    assert all(f"whole {case.id}\n" in text for text in logs)


def test_an_asynchronous_save_has_the_bits_of_the_moment_of_the_call(logs):
    assert all("asynchronous\n" in text for text in logs)


def test_a_run_goes_on_bit_for_bit_on_another_number_of_ranks_and_in_one_process(logs):
    assert all("around\n" in text for text in logs)


def test_a_model_built_on_meta_loads_weights_and_masters(logs):
    assert all("meta\n" in text for text in logs)
