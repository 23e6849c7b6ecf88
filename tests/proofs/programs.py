"""Random programs over an optimizer, each of which must train as its twin without their detours.

    python tests/proofs/programs.py --examples 2000
    python tests/proofs/programs.py --optimizers AdamW --recipes master --seed 7

Prints the shortest program that fails, and exits with 1. What programs do is in
``tests/support/random_programs.py``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path

import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from random_programs import RECIPES, RandomPrograms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=500, help="how many (default: 500)")
    parser.add_argument("--operations", type=int, default=25, help="in each (default: 25)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimizers", nargs="+", choices=RandomPrograms.optimizers)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES)
    arguments = parser.parse_args()
    RandomPrograms.optimizers = tuple(arguments.optimizers or RandomPrograms.optimizers)
    RandomPrograms.recipes = tuple(arguments.recipes or RandomPrograms.recipes)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    options = settings(
        max_examples=arguments.examples,
        stateful_step_count=arguments.operations,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(arguments.seed)(RandomPrograms), settings=options)
    print(f"{arguments.examples} programs trained as their twins")


if __name__ == "__main__":
    main()
