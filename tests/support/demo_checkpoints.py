"""Checkpoints of a short run of the demo, in its four precisions."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from unittest import mock

import lightning
import lightning_demo
import torch
from gpt import GPTConfig

from torch_bf16.tools.compare.corpus import batches, load_corpus

STEPS = 60


class _Save(lightning.Callback):
    def __init__(self, folder: Path, mode: str) -> None:
        self.folder, self.mode = folder, mode

    def on_train_start(self, trainer, module) -> None:
        trainer.save_checkpoint(self.folder / f"{self.mode}-0.ckpt")

    def on_train_end(self, trainer, module) -> None:
        trainer.save_checkpoint(self.folder / f"{self.mode}-{STEPS}.ckpt")


# Our modes store the same either way, and many CPUs are slow at products in bf16.
@mock.patch.dict(os.environ, BF16_COMPUTE="fp32")
def train(folder: Path, lr: float) -> None:
    """Write ``MODE-0.ckpt`` and ``MODE-60.ckpt`` of each precision."""
    corpus = load_corpus(300_000)
    for mode in lightning_demo.MODES:
        torch.manual_seed(0)
        trainer = lightning.Trainer(
            precision=mode,
            max_epochs=1,
            accelerator="cpu",
            callbacks=_Save(folder, mode),
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        model = lightning_demo.LanguageModel(GPTConfig(context=16, width=64, layers=2), lr, STEPS)
        data = batches(corpus.train, n=STEPS, seed=1, batch_size=2, context=16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(model, lightning_demo.loader(data))
