"""A user's script around LightningCLI, with no line for bf16: PACKAGE names the host.

Prints as JSON what was trained how.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import asdict

import torch

pl = importlib.import_module(os.environ["PACKAGE"])
cli = importlib.import_module(f"{pl.__name__}.cli")


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4)


class Model(pl.LightningModule):
    def __init__(self, width: int = 8):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, width), torch.nn.Linear(width, 2)

    def training_step(self, batch, batch_idx):
        return self.head(self.body(batch)).square().mean()


class OwnTrainer(pl.Trainer):
    def __init__(self, *args, own: int = 0, **kwargs):
        super().__init__(*args, **kwargs)
        self.own = own


QUIET = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class CLI(cli.LightningCLI):
    @staticmethod
    def subcommands():
        # The parsers of all four take half of the time.
        return {"fit": cli.LightningCLI.subcommands()["fit"]}

    def add_arguments_to_parser(self, parser):
        parser.add_optimizer_args(torch.optim.AdamW)


def tell(trainer, model):
    plugin = trainer.precision_plugin
    told = {
        "plugin": type(plugin).__module__,
        "recipe": asdict(plugin.recipe) if hasattr(plugin, "recipe") else None,
        "compute": getattr(plugin, "compute", None),
        "release": asdict(plugin.release) if getattr(plugin, "release", None) else None,
        "optimizer": type(trainer.optimizers[0]).__module__,
        "dtypes": {name: str(p.dtype) for name, p in model.named_parameters()},
        "steps": trainer.global_step,
        "own": getattr(trainer, "own", None),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    made = CLI(
        Model,
        Data,
        trainer_class=OwnTrainer,
        trainer_defaults=QUIET,
        save_config_callback=None,
        parser_kwargs={"default_env": True},
    )
    tell(made.trainer, made.model)
