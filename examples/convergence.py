"""Does a recipe end where fp32 ends? The same GPT with every recipe, in pairs, over many seeds.

    python examples/convergence.py --seeds 20 --out convergence

The two runs of a pair share initial weights and batches, and their validation losses at the last
step are compared. The difference of one pair is mostly chance, since any change of a last bit, even
in fp32, leads training to another end; the mean over seeds and its interval are the result.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from paired_runs import (
    CONTROL,
    MIXED,
    NUDGED,
    REFERENCE,
    TO_NEAREST,
    VARIANTS,
    Run,
    final_loss,
    origin,
    run_all,
)
from records import make_room_for
from rich.console import Console
from rich.table import Table

from torch_bf16.tools.arguments import count
from torch_bf16.tools.compare.corpus import load_corpus
from torch_bf16.tools.compare.intervals import Interval
from torch_bf16.tools.output import write_json
from torch_bf16.tools.recipes import BY_BYTES

# Bytes count weight, moments and a bf16 gradient; releasing gradients saves 2.
RECIPES = {**{f"{size} bytes": recipe for size, recipe in BY_BYTES.items()}, CONTROL: TO_NEAREST}
NUDGED_MIXED = f"{NUDGED}, bf16 products"
# In nats, for the whole interval of the difference from fp32.
CLOSE_ENOUGH = {
    name: 0.001 if recipe.bytes_per_parameter + 2 >= 9 else 0.002
    for name, recipe in RECIPES.items()
    if name != CONTROL
}
CLEARLY_WORSE = 0.03


def losses(args: argparse.Namespace) -> dict[str, list[float]]:
    """Final validation losses: a list over seeds for the reference and for each recipe."""
    corpus = load_corpus(args.corpus_bytes)
    chosen = {name: RECIPES[name] for name in args.recipes}
    kinds = {REFERENCE: REFERENCE, MIXED: MIXED, **chosen}
    if args.one_bit:
        kinds |= {NUDGED: REFERENCE, NUDGED_MIXED: MIXED}
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    jobs = {
        (name, seed): functools.partial(
            final_loss,
            Run(
                seed=seed,
                steps=args.steps,
                lr=args.lr,
                width=args.width,
                validation_batches=args.validation_batches,
                optimizer=args.optimizer,
                nudged=name in (NUDGED, NUDGED_MIXED),
            ),
            recipe,
            corpus,
        )
        for seed in seeds
        for name, recipe in kinds.items()
    }
    results = run_all(jobs, args.workers, "runs")
    return {name: [results[name, seed] for seed in seeds] for name in kinds}


def intervals(found: dict[str, list[float]], reference: str) -> dict[str, Interval]:
    """Return the paired differences of each recipe from one of the two fp32 runs."""
    return {
        name: Interval.of([a - b for a, b in zip(found[name], found[reference], strict=True)])
        for name in found
        if name != reference
    }


def holds(name: str, interval: Interval) -> bool:
    """Whether a recipe ends no further above fp32 than it may, or the control as far as it must."""
    if name == CONTROL:
        return interval.low > CLEARLY_WORSE
    return interval.high <= CLOSE_ENOUGH[name]


def table(found: dict[str, list[float]]) -> Table:
    rows = Table(title=f"Validation loss, nats per byte, {len(found[REFERENCE])} seeds")
    for heading in ("recipe", "loss", f"minus {REFERENCE}", f"minus {MIXED}", "limit", ""):
        rows.add_column(heading)
    to_fp32, to_mixed = intervals(found, REFERENCE), intervals(found, MIXED)
    for name, losses_of_seeds in found.items():
        verdict = ("", "")
        if name in RECIPES:
            limit = f"> {CLEARLY_WORSE}" if name == CONTROL else f"<= {CLOSE_ENOUGH[name]}"
            verdict = (limit, "holds" if holds(name, to_fp32[name]) else "DOES NOT HOLD")
        differences = (str(each.get(name, "")) for each in (to_fp32, to_mixed))
        rows.add_row(name, f"{statistics.fmean(losses_of_seeds):.4f}", *differences, *verdict)
    return rows


def plot(differences: dict[str, Interval], path: Path) -> None:
    """Plot differences and intervals, without the control, which is off the scale."""
    from matplotlib.figure import Figure

    shown = {name: each for name, each in differences.items() if name != CONTROL}
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for row, each in enumerate(shown.values()):
        axes.plot([each.low, each.high], [row, row], color="tab:blue")
        axes.plot(each.mean, row, "o", color="tab:blue")
    axes.axvline(0, color="gray", linewidth=0.8)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    axes.set_xlabel("validation loss minus fp32's, nats per byte (mean, 95 % interval)")
    figure.savefig(path, dpi=120)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=count, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--one-bit",
        action="store_true",
        help="both fp32 runs once more, with one weight that is the next number: what chance does",
    )
    parser.add_argument("--steps", type=count, default=1000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--optimizer",
        choices=["AdamW", *VARIANTS, "AdamWScheduleFree", "SGDScheduleFree"],
        default="AdamW",
        help="AdamW, with an option of torch_bf16's, or of the package schedulefree, which must be "
        "installed",
    )
    parser.add_argument("--recipes", nargs="+", choices=[*RECIPES], default=[*RECIPES])
    parser.add_argument("--corpus-bytes", type=int, default=4_000_000)
    parser.add_argument("--validation-batches", type=int, default=128)
    parser.add_argument("--workers", type=count, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("convergence"), help="folder")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a claim fails")
    args = parser.parse_args(arguments)
    if "ScheduleFree" in args.optimizer and find_spec("schedulefree") is None:
        needed = "needs the package schedulefree: pip install schedulefree"
        parser.error(f"--optimizer {args.optimizer} {needed}")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    make_room_for(args.out / "convergence.json")
    started = time.perf_counter()
    found = losses(args)
    differences = {name: intervals(found, name) for name in (REFERENCE, MIXED)}
    Console(width=120).print(table(found))
    record = {
        **origin("convergence.py", arguments),
        "seconds": round(time.perf_counter() - started),
        "settings": {k: v for k, v in vars(args).items() if k not in ("out", "check")},
        "losses": found,
        "recipes": {name: asdict(RECIPES[name]) for name in args.recipes},
        "differences": {
            reference: {name: asdict(each) for name, each in to_reference.items()}
            for reference, to_reference in differences.items()
        },
    }
    write_json(record, args.out / "convergence.json")
    plot(differences[REFERENCE], args.out / "convergence.png")
    print(f"Record and plot: {args.out.resolve()}")
    to_fp32 = differences[REFERENCE]
    return int(args.check and not all(holds(name, to_fp32[name]) for name in args.recipes))


if __name__ == "__main__":
    sys.exit(main())
