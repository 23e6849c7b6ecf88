"""FSDP1 over four gloo processes, in every way, ends with the bits of one process."""

from pathlib import Path

import pytest
from flat_training import CASES, RECIPES, WORLD
from ranks import run_ranks

SCRIPT = Path(__file__).parents[1] / "support" / "flat_training.py"


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """What each of the processes printed; all of them ended well."""
    return run_ranks(SCRIPT, WORLD, tmp_path_factory.mktemp("flat"))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_weights_and_states_equal_one_process_bit_for_bit(logs, case, recipe):
    ranks = [rank for rank, text in enumerate(logs) if f"same {case.id} {recipe}\n" in text]
    assert ranks == list(range(case.ranks))


@pytest.mark.parametrize("way", ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"])
def test_the_norm_is_the_whole_ones_and_replicas_stay_identical(logs, way):
    assert all(f"clipped {way}-" in text for text in logs)


def test_names_come_from_the_parameters_or_from_the_module(logs):
    assert all("named\n" in text for text in logs)


def test_masters_of_weights_that_were_made_equal_are_rank_0s(logs):
    assert all("synced\n" in text for text in logs)


def test_a_gathered_checkpoint_exports_exact_weights(logs):
    assert all("exported\n" in text for text in logs)


def test_a_checkpoint_continues_bit_for_bit_on_another_number_of_ranks(logs):
    assert all("resumed\n" in text for text in logs)


def test_what_flat_parameters_cannot_do_is_refused(logs):
    assert all("refused\n" in text for text in logs)
