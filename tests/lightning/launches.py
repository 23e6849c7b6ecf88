"""Trains by every launcher of DDP: ``launches.py FOLDER`` spawns, and starts itself again.

A notebook imports it for those that fork. The replicas look at one another when they have trained;
each writes what it is to the folder. What a run fails with is written there, too, and the next one
is made all the same.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from lightning_models import (
    FABRICS,
    MODES,
    TRAINERS,
    batches,
    bits,
    host,
    make_module,
    make_trainer,
    network,
    snapshot,
)
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[1] / "support"))
from free_port import free_port

# Each pair of names has one launcher: one package for each, which differ in nothing else.
FORKS = [
    *(("ddp_fork", each) for each in (TRAINERS[0], FABRICS[1])),
    *(("ddp_notebook", each) for each in (TRAINERS[1], FABRICS[0])),
]
# Fabric spawns as it forks.
STARTS = [("ddp_spawn", TRAINERS[0]), ("ddp", TRAINERS[0])]


def look(folder, run, module, optimizer, steps):
    """Whether the other replica has the same bits; a file for each of the two."""
    mine = {name: bits(tensor) for name, tensor in snapshot(module, optimizer).items()}
    both = [None, None]
    dist.all_gather_object(both, mine)
    same = all(torch.equal(both[0][name], both[1][name]) for name in mine)
    told = {
        "same": same,
        "optimizer": type(optimizer).__module__,
        "weights": sorted({str(p.dtype) for p in module.parameters()}),
        "steps": steps,
    }
    (folder / f"{'-'.join(run)}-{dist.get_rank()}.json").write_text(json.dumps(told))


class Classifier(host(TRAINERS[0]).LightningModule):
    """At the top of a file, as spawned processes need it."""

    def __init__(self, folder, run):
        super().__init__()
        torch.manual_seed(3)
        self.net = network()
        self.folder, self.run = folder, run

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_end(self):
        look(self.folder, self.run, self, self.trainer.optimizers[0], self.trainer.global_step)


def in_trainer(folder, strategy, package, mode):
    pl = host(package)
    module = Classifier(folder, (strategy, package))
    if package != TRAINERS[0]:
        hooks = ("training_step", "configure_optimizers", "on_train_end")
        module = make_module(pl, seed=3, **{name: getattr(Classifier, name) for name in hooks})
        module.folder, module.run = folder, (strategy, package)
    before = [p.detach().clone() for p in module.parameters()]
    trainer = make_trainer(pl, mode, devices=2, strategy=strategy, use_distributed_sampler=False)
    trainer.fit(module, batches(3))
    # Also where others trained it, the module of this process has what they learned.
    assert any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert all(torch.equal(p, p.bfloat16().to(p.dtype)) for p in module.parameters())
    dtype = torch.bfloat16 if strategy == "ddp" else torch.float32
    assert {p.dtype for p in module.parameters()} == {dtype}


def in_fabric(fabric, folder, run):
    torch.manual_seed(3)
    net = network()
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(net, adamw)
    for x, y in batches(3):
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    look(folder, run, net, adamw, 3)


def train(folder, runs):
    """By each launcher in each package, the modes in turn."""
    for run, mode in zip(runs, itertools.cycle(MODES), strict=False):
        if "LOCAL_RANK" not in os.environ:
            os.environ["MASTER_PORT"] = str(free_port())
        elif run[0] != "ddp":
            continue  # the process that popen starts runs this file from the top
        try:
            by_launcher(folder, *run, mode)
        except Exception:
            failed = folder / f"{'-'.join(run)}-{os.environ.get('LOCAL_RANK', '0')}.failed"
            failed.write_text(traceback.format_exc())
            if run[0] == "ddp":
                raise  # or the other rank, which nobody joins, would wait for this one


def by_launcher(folder, strategy, package, mode):
    if package in FABRICS:
        fabric = host(package).Fabric(
            accelerator="cpu", devices=2, strategy=strategy, precision=mode
        )
        fabric.launch(in_fabric, folder, (strategy, package))
    else:
        in_trainer(folder, strategy, package, mode)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), STARTS)
    dist.destroy_process_group()
