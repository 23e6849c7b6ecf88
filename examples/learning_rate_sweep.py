"""Down to which learning rate does a recipe keep learning? Fine-tuning at constant rates.

    python examples/learning_rate_sweep.py --seeds 5 --out learning_rate_sweep

A GPT is trained in fp32 on the sources of the standard library, then fine-tuned with every recipe
on another kind of text, the prose of Python's own help topics, from the same weights with the same
batches. The smaller the rate, the smaller each update against the spacing of bf16 numbers.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from paired_runs import CONTROL, REFERENCE, Run, final_loss, origin, run_all, train
from rich.console import Console
from rich.table import Table

import torch_bf16
from torch_bf16 import Recipe
from torch_bf16.tools.compare.corpus import Corpus, load_corpus

RECIPES = {
    "bf16-fp32-master": torch_bf16.get_recipe("bf16-fp32-master"),
    "24-bit weights": Recipe("24-bit weights", weights="bf16+8"),
    "bf16-stochastic": torch_bf16.get_recipe("bf16-stochastic"),
    CONTROL: Recipe(
        CONTROL, weights="bf16_nearest", exp_avg="bf16_nearest", exp_avg_sq="bf16_nearest"
    ),
}
RATES = (1e-4, 3e-5, 1e-5, 3e-6, 1e-6)


def help_topics() -> Corpus:
    """Return Python's help topics; every tenth one is for validation."""
    texts = [topics[name].encode() for name in sorted(topics)]
    parts = {"train": [t for i, t in enumerate(texts) if i % 10], "validation": texts[::10]}
    return Corpus(
        **{
            name: torch.frombuffer(bytearray(b"\n".join(some)), dtype=torch.uint8)
            for name, some in parts.items()
        }
    )


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
        for seed, result in run_all(pretraining.items(), args.workers, "pretraining").items()
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
    results = run_all(jobs.items(), args.workers, "fine-tuning")
    before = [results["before", 0.0, seed] for seed in seeds]
    after = {
        name: {lr: [results[name, lr, seed] for seed in seeds] for lr in RATES}
        for name in (REFERENCE, *RECIPES)
    }
    return before, after


def learned(before: list[float], after: dict[str, dict[float, list[float]]]):
    """Return, by recipe and rate, the share of fp32's improvement, summed over seeds."""

    def improvement(name: str, lr: float) -> float:
        return sum(a - b for a, b in zip(before, after[name][lr], strict=True))

    return {
        name: {lr: improvement(name, lr) / improvement(REFERENCE, lr) for lr in RATES}
        for name in RECIPES
    }


def table(before: list[float], after: dict[str, dict[float, list[float]]]) -> Table:
    rows = Table(title="Share of fp32's improvement that each recipe reaches")
    rows.add_column("recipe")
    for lr in RATES:
        rows.add_column(f"{lr:g}", justify="right")
    gained = [(sum(before) - sum(after[REFERENCE][lr])) / len(before) for lr in RATES]
    rows.add_row("fp32, in nats per byte", *(f"{each:.4f}" for each in gained))
    for name, shares in learned(before, after).items():
        rows.add_row(name, *(f"{shares[lr]:.1%}" for lr in RATES))
    return rows


def plot(shares: dict[str, dict[float, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, each in shares.items():
        axes.plot(list(each), list(each.values()), "o-", label=name)
    axes.set(xscale="log", xlabel="learning rate", ylabel="share of fp32's improvement")
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--pretraining-steps", type=int, default=2000)
    parser.add_argument("--corpus-bytes", type=int, default=4_000_000)
    parser.add_argument("--validation-batches", type=int, default=128)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("learning_rate_sweep"), help="folder")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if args.seeds < 1:
        sys.exit(f"--seeds {args.seeds} must be at least 1")
    before, after = sweep(args)
    shares = learned(before, after)
    Console(width=100).print(table(before, after))
    args.out.mkdir(parents=True, exist_ok=True)
    record = {
        **origin("learning_rate_sweep.py", arguments),
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        "before": before,
        "after": after,
        "share_of_improvement": shares,
    }
    (args.out / "learning_rate_sweep.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(shares, args.out / "learning_rate_sweep.png")
    print(f"Record and plot: {args.out.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
