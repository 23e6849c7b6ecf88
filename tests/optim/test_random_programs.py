"""Some random programs; ``python tests/proofs/programs.py`` runs as many as are asked for."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from random_programs import EXACT, RECIPES, RandomPrograms

# Without making a failing program shorter, which takes minutes: the command does that.
SOME = settings(
    phases=[Phase.generate],
    max_examples=20,
    stateful_step_count=20,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", ["AdamW", "Adamax"])
@pytest.mark.parametrize("recipes", [EXACT, RECIPES.keys() - EXACT], ids=["exact", "rounded"])
def test_detours_of_a_program_change_no_bit(optimizer, recipes):
    class Some(RandomPrograms):
        optimizers = (optimizer,)

    Some.recipes = tuple(sorted(recipes))
    run_state_machine_as_test(Some, settings=SOME)
