"""A LightningModule and the Trainer: the mode is a precision, and nothing else changes.

python examples/lightning_trainer.py --precision bf16-stochastic
"""

from __future__ import annotations

import argparse

import lightning
import torch
from gpt import GPT, GPTConfig, add_size_arguments, next_byte_loss
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

import lightning_bf16
from torch_bf16.tools.compare.corpus import batches, load_corpus


class LanguageModel(lightning.LightningModule):
    def __init__(self, config: GPTConfig, lr: float) -> None:
        super().__init__()
        self.model, self.lr = GPT(config), lr

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return next_byte_loss(self.model, batch)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("validation_loss", next_byte_loss(self.model, batch), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", default="bf16-stochastic", help="any that Trainer knows")
    parser.add_argument("--steps", type=int, default=300)
    add_size_arguments(parser)
    args = parser.parse_args(arguments)
    if args.steps < 1:
        parser.error(f"--steps {args.steps} must be at least 1")

    lightning.seed_everything(0)
    corpus = load_corpus(args.corpus_bytes)
    shape = {"batch_size": args.batch_size, "context": args.context}
    train = batches(corpus.train, n=args.steps, seed=1, **shape)
    validation = batches(corpus.validation, n=16, seed=2, **shape)
    config = GPTConfig(context=args.context, width=args.width, layers=args.layers)

    # Logs for each layer what share of its updates survives rounding, and warns if a layer stalls.
    ours = args.precision in ("bf16-stochastic", "bf16-fp32-master")
    callbacks = [lightning_bf16.BF16Monitor()] if ours else []
    trainer = lightning.Trainer(
        precision=args.precision,
        max_epochs=1,
        callbacks=callbacks,
        gradient_clip_val=1.0,
        logger=CSVLogger("lightning-trainer"),
    )
    trainer.fit(
        LanguageModel(config, args.lr),
        DataLoader(train, batch_size=None),
        DataLoader(validation, batch_size=None),
    )
    return trainer.callback_metrics["validation_loss"].item()


if __name__ == "__main__":
    main()
