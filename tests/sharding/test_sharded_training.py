"""Training over four gloo processes, sharded in every way, ends with the bits of one process."""

from pathlib import Path

import pytest
from ranks import run_ranks
from sharded_training import CASES, SPLIT, WORLD, Case

SCRIPT = Path(__file__).parents[1] / "support" / "sharded_training.py"


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """What each of the processes printed; all of them ended well."""
    return run_ranks(SCRIPT, WORLD, tmp_path_factory.mktemp("sharded"))


PAIRS = [(case, recipe) for case in CASES for recipe in case.recipes]


@pytest.mark.parametrize(
    ("case", "recipe"), PAIRS, ids=[f"{case.id}-{recipe}" for case, recipe in PAIRS]
)
def test_weights_and_states_equal_one_process_bit_for_bit(logs, case, recipe):
    ranks = [rank for rank, text in enumerate(logs) if f"same {case.id} {recipe}\n" in text]
    expected = 1
    for size in case.mesh:
        expected *= size
    assert ranks == list(range(expected))


@pytest.mark.parametrize(
    "case", [Case("ddp", (4,)), Case("hsdp", (2, 2)), Case("fsdp2+tp", (2, 2))]
)
def test_replicas_stay_identical_through_backward_passes_and_clipping(logs, case):
    assert all(f"replicas {case.way}-" in text for text in logs)


def test_a_checkpoint_continues_bit_for_bit_when_it_is_sharded_in_another_way(logs):
    assert all("resumed\n" in text for text in logs)


@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.id)
def test_a_cut_through_blocks_is_refused_on_every_rank(logs, case):
    assert [f"refused {case.id}\n" in text for text in logs] == [
        rank < case.mesh[0] for rank in range(WORLD)
    ]


def test_averages_of_sharded_parameters_are_refused(logs):
    assert all("no averages\n" in text for text in logs)
