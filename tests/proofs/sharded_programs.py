"""Random programs on several ranks, each of which must train as a twin in one process.

    python tests/proofs/sharded_programs.py fsdp2 --programs 100 --ranks 2

Prints the operations of each program that fails, and exits with 1. What programs do is in
``tests/support/sharded_programs.py``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from ranks import RankError, Ranks
from sharded_programs import WRAPPERS, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wrapper", choices=WRAPPERS)
    parser.add_argument("--programs", type=int, default=50, help="how many (default: 50)")
    parser.add_argument("--operations", type=int, default=10, help="in each (default: 10)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="that of the first program")
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(Path(folder))
        for seed in range(arguments.seed, arguments.seed + arguments.programs):
            try:
                ranks(arguments.ranks, train, arguments.wrapper, seed, arguments.operations)
            except RankError as error:
                failed += 1
                print(f"seed {seed}:\n{error}", flush=True)
    print(f"{arguments.programs - failed} of {arguments.programs} programs trained as their twins")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
