"""Sharded optimizers without a fused rule end with the bits of one process."""

from pathlib import Path

import pytest
from ranks import run_ranks
from sharded_foreign import CASES, FLAT, RESUMED, WORLD

SCRIPT = Path(__file__).parents[1] / "support" / "sharded_foreign.py"


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """What each of the processes printed; all of them ended well."""
    return run_ranks(SCRIPT, WORLD, tmp_path_factory.mktemp("own_steps"))


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, kind) for case, kind, _ in CASES],
    ids=[f"{case.id}-{kind}" for case, kind, _ in CASES],
)
def test_weights_and_states_equal_one_process_bit_for_bit(logs, case, kind):
    ranks = [rank for rank, text in enumerate(logs) if f"same {case.id} {kind}\n" in text]
    expected = 1
    for size in case.mesh:
        expected *= size
    assert ranks == list(range(expected))


@pytest.mark.parametrize("kind", [kind for kind, _ in RESUMED])
def test_a_checkpoint_continues_bit_for_bit_on_another_mesh_and_in_one_process(logs, kind):
    assert all(f"resumed {kind}\n" in text for text in logs)


@pytest.mark.parametrize("case", FLAT, ids=lambda case: case.id)
def test_steps_on_elements_go_through_fsdp1(logs, case):
    ranks = [rank for rank, text in enumerate(logs) if f"flat {case.id}\n" in text]
    assert ranks == list(range(case.ranks))


def test_random_steps_and_whole_tensors_under_fsdp1_are_refused(logs):
    assert all("refused\n" in text for text in logs)
