"""A user's script with a plain Trainer, with no line for bf16 and none about precision at all."""

from __future__ import annotations

import torch
from cli_app import QUIET, Data, Model, pl, tell


class Trained(Model):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    trainer, model = pl.Trainer(**QUIET), Trained()
    trainer.fit(model, Data())
    tell(trainer, model)
