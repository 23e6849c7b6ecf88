"""The benchmark of two commits, in turn.

    python tests/proofs/before_after.py dad9a4e HEAD --repeats 5 --model gpt2-124m --rounds 10

What it does not know itself is given to ``python -m torch_bf16 bench`` of both, each in a process
of its own, with the packages of the interpreter that runs this. Printed are, for each row that both
have, the medians and the range of all processes: the ratio to the benchmark's baseline before and
after, and the time after divided by the time before, of neighbouring processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from torch_bf16.tools.output import print_table

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="a commit")
    parser.add_argument("after", nargs="?", default="HEAD", help="another (default: HEAD)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="processes of each")
    options, arguments = parser.parse_known_args()
    # Of commits, not of this tree: what is edited meanwhile would be measured as well.
    pairs = []
    with checkout(options.before) as before, checkout(options.after) as after:
        for number in range(options.repeats):
            # The first of a pair changes, as a machine may slow down or speed up meanwhile.
            trees = [before, after][:: -1 if number % 2 else 1]
            rows = {tree: bench(tree, arguments) for tree in trees}
            pairs.append((rows[before], rows[after]))
            print(f"{number + 1} of {options.repeats}", file=sys.stderr)
    title = f"{options.before} and {options.after}, medians and ranges of {options.repeats} pairs"
    columns = ["", "ratio before", "ratio after", "time after / before"]
    print_table(title, columns, compared(pairs))


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A work tree of a commit, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, commit.replace("/", "-"))
        git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def git(*arguments: str) -> None:
    subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True)


def bench(tree: Path, arguments: list[str]) -> dict[str, tuple[float, float]]:
    """Milliseconds per step and the ratio to the baseline, of each row."""
    environment = os.environ | {"PYTHONPATH": str(tree / "kernels")}
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        command = [sys.executable, "-m", "torch_bf16", "bench", *arguments, "--json", str(record)]
        subprocess.run(
            command, env=environment, cwd=tree, stdout=subprocess.DEVNULL, check=True, timeout=900
        )
        rows = json.loads(record.read_text())["results"]
    return {row["name"]: (row["ms"]["median"], row["ratio"]["median"]) for row in rows}


def compared(pairs: list[tuple[dict, dict]]) -> list[list[str]]:
    rows = []
    for name in dict.fromkeys(name for pair in pairs for each in pair for name in each):
        if not all(name in each for pair in pairs for each in pair):
            rows.append([name, "not in all processes", "", ""])
            continue
        before, after = zip(*((a[name], b[name]) for a, b in pairs), strict=True)
        times = [b[0] / a[0] for a, b in zip(before, after, strict=True)]
        columns = [[each[1] for each in before], [each[1] for each in after], times]
        rows.append([name, *map(spread, columns)])
    return rows


def spread(numbers: list[float]) -> str:
    return f"{median(numbers):.3f} [{min(numbers):.3f}, {max(numbers):.3f}]"


if __name__ == "__main__":
    main()
