"""The small module, data and trainer that the Lightning tests share."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

TRAINERS = ("lightning.pytorch", "pytorch_lightning")
FABRICS = ("lightning.fabric", "lightning_fabric")
MODES = ("bf16-stochastic", "bf16-fp32-master")
FEATURES, CLASSES, BATCH = 8, 4, 4


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, CLASSES)
    )


def batches(count: int, seed: int = 0, repeat: int = 1) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    made = [
        (
            torch.randn(BATCH, FEATURES, generator=generator),
            torch.randint(CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(count)
    ]
    return loader(made * repeat)


def loader(data: list[Any]) -> DataLoader:
    """These batches as they are, in this order."""
    return DataLoader(data, batch_size=None)  # pyright: ignore[reportArgumentType]


def make_module(pl: Any, *, seed: int = 0, **hooks: Any) -> Any:
    """A LightningModule of that package; ``hooks`` replace its methods.

    It notes the loss dtypes in ``seen`` and its optimizers in ``made``.
    """

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.net = network()
            self.seen: list[torch.dtype] = []
            self.made: list[torch.optim.Optimizer] = []

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self(x), y)
            self.seen.append(loss.dtype)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

        def test_step(self, batch, batch_idx):
            self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

        def predict_step(self, batch, batch_idx):
            return self.net(batch[0])

        def configure_optimizers(self):
            self.made = [torch.optim.AdamW(self.parameters(), lr=1e-2)]
            return self.made[0]

    for name, hook in hooks.items():
        setattr(Classifier, name, hook)
    return Classifier()


def make_trainer(pl: Any, mode: str | None = None, **options: Any) -> Any:
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
    }
    if mode is not None:
        defaults["precision"] = mode
    return pl.Trainer(**{**defaults, **options})


def host(name: str) -> Any:
    return importlib.import_module(name)


def bits(tensor: Tensor) -> Tensor:
    """The bit pattern, so that comparisons see every difference and no NaN gets in the way."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(integer[tensor.element_size()])


def snapshot(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of every weight and every tensor of the optimizer's state, by name."""
    found = {f"weight {name}": p.detach().clone() for name, p in module.named_parameters()}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            found[f"state {index} {key}"] = torch.as_tensor(value).clone()
    return found


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of what is not equal bit for bit, in dtype or in presence."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one
        or name not in other
        or one[name].dtype != other[name].dtype
        or not torch.equal(bits(one[name]), bits(other[name]))
    ]


def callbacks_of(pl):
    return importlib.import_module(f"{pl.__name__}.callbacks")


def callback_of(pl, name):
    """A class of callbacks, which older versions may lack: then the test is skipped."""
    found = getattr(callbacks_of(pl), name, None)
    if found is None:
        pytest.skip(f"this version has no {name}")
    return found


def tuner_of(pl, trainer):
    return importlib.import_module(f"{pl.__name__}.tuner").Tuner(trainer)
