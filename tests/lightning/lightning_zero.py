"""ZeroRedundancyOptimizer through Trainer and Fabric, as every rank does it."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning_models import FABRICS, TRAINERS, host, loader, make_module, make_trainer
from matrix_cells import micro_batches
from torch import distributed as dist
from torch.nn import functional as F
from torchrun_variables import as_torchrun_says

import lightning_bf16
from lightning_bf16 import fabric as fabric_plugin

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of functional optimizers, which it imports
    from torch.distributed.optim import ZeroRedundancyOptimizer

TRAINER, FABRIC = TRAINERS[0], FABRICS[0]


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def zero(module):
    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-2)


@as_torchrun_says()
def trained(package, make):
    """The weights that a rank ends with."""
    data = loader(micro_batches(dist.get_rank(), 2))
    if package == TRAINER:
        pl = host(package)
        module = make_module(pl, seed=3, configure_optimizers=make)
        plugins = [lightning_bf16.BF16Precision()]
        options = {"max_epochs": 2, "use_distributed_sampler": False, "plugins": plugins}
        make_trainer(pl, devices=2, strategy="ddp", **options).fit(module, data)
        return [p.detach().clone() for p in module.parameters()]
    fabric = prepared()
    torch.manual_seed(3)
    module = torch.nn.Linear(8, 4)
    model, optimizer = fabric.setup(module, make(module))
    for x, y in data:
        fabric.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in module.parameters()]


def prepared(**options):
    plugins = [fabric_plugin.BF16Precision(**options)]
    fabric = host(FABRIC).Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=plugins)
    fabric.launch()
    return fabric


@as_torchrun_says()
def refused():
    for options in ({"accumulate": "fp32"}, {"reduce": "bf16_wire"}, {"release_gradients": True}):
        fabric, module = prepared(**options), torch.nn.Linear(8, 4)
        with pytest.raises(ValueError, match="as in ZeroRedundancyOptimizer, where each rank"):
            fabric.setup(module, zero(module))
