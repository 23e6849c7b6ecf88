"""Down to which learning rate does a recipe keep learning? Fine-tuning at constant rates.

    python examples/learning_rate_sweep.py --seeds 5 --out learning_rate_sweep

A GPT is trained in fp32 on the sources of the standard library, then fine-tuned with every recipe
on another kind of text, the prose of Python's own help topics, from the same weights with the same
batches. The smaller the rate, the smaller each update against the spacing of bf16 numbers.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from pydoc_data.topics import topics

from paired_runs import CONTROL, REFERENCE, TO_NEAREST, Run, final_loss, origin, run_all, train
from records import make_room_for
from rich.console import Console
from rich.table import Table

import torch_bf16
from torch_bf16 import Recipe
from torch_bf16.tools.arguments import count
from torch_bf16.tools.compare.corpus import Corpus, load_corpus
from torch_bf16.tools.compare.intervals import Interval
from torch_bf16.tools.output import write_json

RECIPES = {
    "bf16-fp32-master": torch_bf16.get_recipe("bf16-fp32-master"),
    "24-bit weights": Recipe("24-bit weights", weights="bf16+8"),
    "bf16-stochastic": torch_bf16.get_recipe("bf16-stochastic"),
    CONTROL: TO_NEAREST,
}
RATES = (1e-4, 3e-5, 1e-5, 3e-6, 1e-6)


def help_topics() -> Corpus:
    """Return Python's help topics; every tenth one is for validation."""
    texts = [topics[name].encode() for name in sorted(topics)]
    return Corpus.of([text for i, text in enumerate(texts) if i % 10], texts[::10])


def sweep(args: argparse.Namespace) -> tuple[list[float], dict[str, dict[float, list[float]]]]:
    """Losses on the new text: before fine-tuning, and after it by recipe, rate and seed."""
    first, second = load_corpus(args.corpus_bytes), help_topics()
    seeds = range(args.seeds)
    pretraining = {
        seed: functools.partial(
            train, Run(seed=seed, steps=args.pretraining_steps, lr=1e-3), REFERENCE, first
        )
        for seed in seeds
    }
    weights = {
        seed: result[1]
        for seed, result in run_all(pretraining, args.workers, "pretraining").items()
    }

    def fine_tuning(seed: int, steps: int, lr: float) -> Run:
        return Run(
            seed=1000 + seed,
            steps=steps,
            lr=lr,
            schedule=False,
            start=weights[seed],
            betas=(0.9, 0.95),
            weight_decay=0.0,
            validation_batches=args.validation_batches,
        )

    jobs = {
        (name, lr, seed): functools.partial(
            final_loss, fine_tuning(seed, args.steps, lr), recipe, second
        )
        for name, recipe in {REFERENCE: REFERENCE, **RECIPES}.items()
        for lr in RATES
        for seed in seeds
    }
    jobs |= {
        ("before", 0.0, seed): functools.partial(
            final_loss, fine_tuning(seed, 0, 0.0), REFERENCE, second
        )
        for seed in seeds
    }
    results = run_all(jobs, args.workers, "fine-tuning")
    before = [results["before", 0.0, seed] for seed in seeds]
    after = {
        name: {lr: [results[name, lr, seed] for seed in seeds] for lr in RATES}
        for name in (REFERENCE, *RECIPES)
    }
    return before, after


def learned(
    before: list[float], after: dict[str, dict[float, list[float]]]
) -> dict[str, dict[float, Interval | None]]:
    """Return, by recipe and rate, the share of fp32's improvement that the recipe reaches.

    It is one minus the paired differences from fp32 over fp32's mean improvement; None where fp32
    did not improve.
    """
    found: dict[str, dict[float, Interval | None]] = {name: {} for name in RECIPES}
    for lr, reference in after[REFERENCE].items():
        gained = statistics.fmean(before) - statistics.fmean(reference)
        for name, shares in found.items():
            pairs = zip(reference, after[name][lr], strict=True)
            reached = [1 + (a - b) / gained for a, b in pairs] if gained > 0 else []
            shares[lr] = Interval.of(reached) if reached else None
    return found


def table(before: list[float], after: dict[str, dict[float, list[float]]]) -> Table:
    rows = Table(title="% of fp32's improvement that each recipe reaches, and its 95 % interval")
    rows.add_column("recipe")
    for lr in RATES:
        rows.add_column(f"{lr:g}", justify="right")
    gained = [statistics.fmean(before) - statistics.fmean(after[REFERENCE][lr]) for lr in RATES]
    rows.add_row("fp32, in nats per byte", *(f"{each:.4f}" for each in gained))
    for name, shares in learned(before, after).items():
        rows.add_row(name, *(percent(shares[lr]) for lr in RATES))
    return rows


def percent(share: Interval | None) -> str:
    if share is None:
        return "-"
    mean, low, high = (f"{100 * each:.2f}" for each in (share.mean, share.low, share.high))
    return f"{mean} [{low}, {high}]"


def plot(shares: dict[str, dict[float, Interval | None]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, each in shares.items():
        known = {lr: share.mean for lr, share in each.items() if share is not None}
        axes.plot(list(known), list(known.values()), "o-", label=name)
    axes.set(xscale="log", xlabel="learning rate", ylabel="share of fp32's improvement")
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.legend()
    figure.savefig(path, dpi=120)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--seeds", type=count, default=5)
    parser.add_argument("--steps", type=count, default=500)
    parser.add_argument("--pretraining-steps", type=int, default=2000)
    parser.add_argument("--corpus-bytes", type=int, default=4_000_000)
    parser.add_argument("--validation-batches", type=int, default=128)
    parser.add_argument("--workers", type=count, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("learning_rate_sweep"), help="folder")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    make_room_for(args.out / "learning_rate_sweep.json")
    before, after = sweep(args)
    shares = learned(before, after)
    Console(width=150).print(table(before, after))
    record = {
        **origin("learning_rate_sweep.py", arguments),
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        "before": before,
        "after": after,
        "share_of_improvement": {
            name: {lr: share and asdict(share) for lr, share in each.items()}
            for name, each in shares.items()
        },
    }
    write_json(record, args.out / "learning_rate_sweep.json")
    plot(shares, args.out / "learning_rate_sweep.png")
    print(f"Record and plot: {args.out.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
