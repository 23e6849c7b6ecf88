"""Trainings whose gradients travel in bf16, by Trainer and Fabric over two ranks."""

from __future__ import annotations

from unittest import mock

import torch
from lightning_models import FABRICS, TRAINERS, host, loader, make_module, make_trainer
from matrix_cells import Cell, Named, adamw, flattening, micro_batches, shard, sharding, whole
from torch import distributed as dist
from torch.nn import functional as F
from torchrun_variables import as_torchrun_says

TRAINER, FABRIC = TRAINERS[0], FABRICS[0]


@as_torchrun_says()
def trained(package, strategy, reduce):
    """The weights that two ranks end with, equal on both, and how many exchanges there were."""
    cell = Cell(strategy, (2, 1), package, "")
    own = host(f"lightning_bf16.{package.rpartition('.')[2]}")
    plugin = own.BF16Precision("bf16-stochastic", reduce=reduce)
    strategies, chosen = host(f"{package}.strategies"), strategy
    if strategy == "fsdp1":
        chosen = flattening(strategies)
    exchanges = mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single)
    with exchanges as exchange:
        way = by_trainer if package == TRAINER else by_fabric
        module = way(cell, strategies, chosen, plugin)
        parameters = dict(module.named_parameters())
        return whole(parameters, parameters), exchange.call_count


def by_trainer(cell, strategies, chosen, plugin):
    pl = host(cell.package)
    hooks = {"configure_optimizers": adamw}
    if cell.strategy == "fsdp2":
        chosen = strategies.ModelParallelStrategy(2, 1)
        hooks["configure_model"] = lambda self: shard(self.net, cell, self.device_mesh)
    module = make_module(pl, seed=3, **hooks)
    options = {"max_epochs": 2, "use_distributed_sampler": False}
    trainer = make_trainer(pl, devices=2, strategy=chosen, plugins=[plugin], **options)
    trainer.fit(module, loader(micro_batches(dist.get_rank(), 2)))
    return module


def by_fabric(cell, strategies, chosen, plugin):
    if cell.strategy == "fsdp2":
        chosen = strategies.ModelParallelStrategy(sharding(cell), 2, 1)
    fabric = host(cell.package).Fabric(
        accelerator="cpu", devices=2, strategy=chosen, plugins=[plugin]
    )
    fabric.launch()
    torch.manual_seed(3)
    model = fabric.setup_module(Named())
    optimizer = fabric.setup_optimizers(adamw(model))
    for _ in range(2):
        for x, y in micro_batches(dist.get_rank(), 2):
            fabric.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return model.module
