"""One small GPT, trained through Lightning's Trainer in four precisions from the same start.

    python examples/lightning_demo.py

The script only names the precisions: with torch-bf16 installed, Trainer knows their names. If that
is switched off (``BF16_AUTOLOAD=0``), add ``import lightning_bf16``.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import lightning
import torch
from gpt import GPT, GPTConfig, add_size_arguments, next_byte_loss
from records import make_room_for
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch.utils.data import DataLoader

from torch_bf16.tools.compare.corpus import Corpus, batches, load_corpus
from torch_bf16.tools.compare.schedule import learning_rate_factor
from torch_bf16.tools.optimizer_bytes import held_bytes
from torch_bf16.tools.output import write_json

REFERENCE = "32-true"
CONTROL = "bf16-true"  # stock Lightning: weights and Adam's moments rounded to the nearest bf16
CLOSE_ENOUGH = {"bf16-fp32-master": 0.005, "bf16-stochastic": 0.01}  # nats
CLEARLY_WORSE = 0.03  # nats
MODES = (REFERENCE, *CLOSE_ENOUGH, CONTROL)


class LanguageModel(lightning.LightningModule):
    """The code that a user writes: a model, a loss and torch's own optimizer."""

    def __init__(self, config: GPTConfig, lr: float, steps: int) -> None:
        super().__init__()
        self.model, self.lr, self.steps = GPT(config), lr, steps

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return next_byte_loss(self.model, batch)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return next_byte_loss(self.model, batch)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, self.steps)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


@dataclass
class Run:
    """The results of one training run."""

    train_losses: list[float] = field(default_factory=list)
    validation_loss: float = float("nan")
    step_seconds: list[float] = field(default_factory=list)
    bytes_per_parameter: float = float("nan")


class Recorder(lightning.Callback):
    """Fills a ``Run`` and advances the progress bar."""

    def __init__(self, run: Run, progress: Progress, task: int) -> None:
        self.run, self.progress, self.task = run, progress, task
        self.validation_losses: list[float] = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        # item() waits for the device, so the time taken after it is the whole step's.
        self.run.train_losses.append(outputs["loss"].item())
        self.run.step_seconds.append(time.perf_counter() - self.started)
        self.progress.update(self.task, advance=1, loss=f"{self.run.train_losses[-1]:.3f}")
        if trainer.is_last_batch:  # now, while the gradients still exist
            self.run.bytes_per_parameter = bytes_per_parameter(module, trainer.optimizers[0])

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.validation_losses.append(outputs.item())

    def on_validation_end(self, trainer, module) -> None:
        self.run.validation_loss = statistics.fmean(self.validation_losses)
        self.validation_losses.clear()


def bytes_per_parameter(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes of weights, gradients and optimizer state; shared storage counts once."""
    return held_bytes(optimizer) / sum(p.numel() for p in module.parameters())


def train(mode: str, args: argparse.Namespace, corpus: Corpus, progress: Progress) -> Run:
    """Train in one precision; weights and batches at the start depend on ``args`` alone."""
    run = Run()
    task = progress.add_task(mode, total=args.steps, loss="")
    torch.manual_seed(args.seed)
    config = GPTConfig(context=args.context, width=args.width, layers=args.layers)
    shape = {"batch_size": args.batch_size, "context": args.context}
    trainer = lightning.Trainer(
        precision=mode,
        max_epochs=1,
        accelerator=args.accelerator,
        devices=1,
        callbacks=Recorder(run, progress, task),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(
        LanguageModel(config, args.lr, args.steps),
        loader(batches(corpus.train, n=args.steps, seed=args.seed + 1, **shape)),
        loader(batches(corpus.validation, n=args.validation_batches, seed=args.seed + 2, **shape)),
    )
    return run


def loader(ready_batches: torch.Tensor) -> DataLoader:
    return DataLoader(ready_batches, batch_size=None)


def results_table(runs: dict[str, Run]) -> Table:
    table = Table(title="The same GPT, the same batches, four ways to keep its numbers")
    table.add_column("precision")
    for heading in ("validation loss", "vs 32-true", "bytes/parameter", "ms/step"):
        table.add_column(heading, justify="right")
    for mode, run in runs.items():
        difference = run.validation_loss - runs[REFERENCE].validation_loss
        table.add_row(
            mode,
            f"{run.validation_loss:.4f}",
            "" if mode == REFERENCE else f"{difference:+.4f}",
            f"{run.bytes_per_parameter:.2f}",
            f"{1e3 * statistics.median(run.step_seconds):.0f}",
        )
    return table


def verdicts(runs: dict[str, Run]) -> list[tuple[bool, str]]:
    """Return each claim of the demo as (whether it holds, a sentence that says so)."""
    reference = runs[REFERENCE].validation_loss
    found = []
    for mode, limit in CLOSE_ENOUGH.items():
        difference = runs[mode].validation_loss - reference
        holds = abs(difference) <= limit
        word = "within" if holds else "NOT within"
        found.append((holds, f"{mode} is {word} {limit} nats of {REFERENCE} ({difference:+.4f})."))
    difference = runs[CONTROL].validation_loss - reference
    holds = difference > CLEARLY_WORSE
    word = "clearly worse than" if holds else "NOT clearly worse than"
    found.append(
        (holds, f"The control, {CONTROL}, is {word} {REFERENCE} ({difference:+.4f} nats).")
    )
    return found


def plot(runs: dict[str, Run], path: Path) -> None:
    """Plot training loss and the distance from 32-true on the same batches, both smoothed."""
    from matplotlib.figure import Figure

    window = max(1, len(runs[REFERENCE].train_losses) // 20)

    def smooth(losses: list[float]) -> torch.Tensor:
        return torch.tensor(losses, dtype=torch.float64).unfold(0, window, 1).mean(-1)

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    reference = smooth(runs[REFERENCE].train_losses)
    for mode, run in runs.items():
        losses = smooth(run.train_losses)
        steps = range(window, window + len(losses))
        left.plot(steps, losses, label=mode)
        right.plot(steps, losses - reference, label=mode)
    left.set(xlabel="step", ylabel="training loss, nats per byte")
    right.set(xlabel="step", ylabel=f"training loss minus {REFERENCE}'s")
    left.legend()
    figure.savefig(path, dpi=120)


def record(runs: dict[str, Run], args: argparse.Namespace, path: Path) -> None:
    """Write the losses and bytes of each run, with settings and versions, to a file."""
    settings = ("seed", "steps", "batch_size", "context", "width", "layers", "lr")
    found = {
        "settings": {name: getattr(args, name) for name in settings},
        "versions": {name: version(name) for name in ("torch-bf16", "torch", "lightning")},
        "runs": {
            mode: {
                "validation_loss": run.validation_loss,
                "bytes_per_parameter": run.bytes_per_parameter,
                "train_losses": [round(loss, 4) for loss in run.train_losses],
            }
            for mode, run in runs.items()
        },
    }
    write_json(found, path)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    add_size_arguments(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validation-batches", type=int, default=64)
    parser.add_argument("--accelerator", default="auto", help="as Trainer(accelerator=...)")
    parser.add_argument("--plot", type=Path, default=Path("demo/loss_curves.png"))
    parser.add_argument("--json", type=Path, help="write losses and bytes there")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a claim fails")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    make_room_for(args.plot)
    make_room_for(args.json)
    # Lightning reports devices and its own tips once per Trainer: four times here.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # The batches are already in memory; workers would only copy them.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # Lightning 2.6 calls a pytree function that torch 2.13 has deprecated.
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec", category=FutureWarning)
    console = Console()
    corpus = load_corpus(args.corpus_bytes)
    console.print(
        f"Python's own sources: {len(corpus.train):,} bytes to train on, "
        f"{len(corpus.validation):,} from other files to validate on."
    )
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )
    with Progress(*columns, console=console) as progress:
        runs = {mode: train(mode, args, corpus, progress) for mode in MODES}
    console.print(results_table(runs))
    found = verdicts(runs)
    for holds, sentence in found:
        console.print(
            sentence, style=None if holds else "bold red", highlight=False, soft_wrap=True
        )
    if args.json is not None:
        record(runs, args, args.json)
    plot(runs, args.plot)
    console.print(f"Loss curves: {args.plot.resolve()}", highlight=False, soft_wrap=True)
    return int(args.check and not all(holds for holds, _ in found))


if __name__ == "__main__":
    sys.exit(main())
