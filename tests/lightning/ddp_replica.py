"""One of the processes that test_lightning_ddp.py starts: train in every way, save what came out.

Usage: ddp_replica.py FOLDER STEPS. Rank and world size come from torchrun's variables.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
from lightning_models import MODES, batches, host, make_module, make_trainer, network, snapshot
from torch.nn import functional as F

RANK = int(os.environ.get("RANK", "0"))
RUNS = [
    ("lightning.pytorch", MODES[0]),
    ("lightning.pytorch", MODES[1]),
    ("pytorch_lightning", MODES[1]),
    ("lightning.fabric", MODES[0]),
    ("lightning_fabric", MODES[1]),
]


def trained_by_trainer(pl, mode, steps, lr):
    def configure_optimizers(self):
        # Ranks that draw from different generators, before and while they train.
        torch.manual_seed(1000 + RANK)
        self.made = [torch.optim.AdamW(self.parameters(), lr=lr)]
        return self.made[0]

    module = make_module(pl, seed=RANK, configure_optimizers=configure_optimizers)
    first = module.net[0].weight.detach().clone()
    trainer = make_trainer(
        pl,
        mode,
        devices=2,
        strategy="ddp",
        max_steps=steps,
        max_epochs=-1,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
    )
    trainer.fit(module, batches(10, seed=RANK))
    assert trainer.world_size == 2
    assert trainer.global_step == steps
    return first, snapshot(module, module.made[0])


def trained_by_fabric(package, mode, steps, lr):
    fabric = package.Fabric(accelerator="cpu", devices=2, strategy="ddp", precision=mode)
    fabric.launch()
    torch.manual_seed(RANK)
    net = network()
    first = net[0].weight.detach().clone()
    adamw = torch.optim.AdamW(net.parameters(), lr=lr)
    if mode == MODES[0]:
        model, optimizer = fabric.setup(net, adamw)
    else:
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(adamw)
    torch.manual_seed(1000 + RANK)
    data = list(batches(10, seed=RANK))
    for step in range(steps):
        x, y = data[step % len(data)]
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    return first, snapshot(net, adamw)


def main(folder: Path, steps: int) -> None:
    for package, mode in RUNS:
        train = trained_by_fabric if "fabric" in package else trained_by_trainer
        first, trained = train(host(package), mode, steps, lr=1e-2)
        torch.save({"first": first, **trained}, folder / f"{package}-{mode}-{RANK}.pt")
        if mode == "bf16-fp32-master":
            # A step that changes no weight shows what the masters started from.
            first, trained = train(host(package), mode, 1, lr=0.0)
            torch.save({"first": first, **trained}, folder / f"{package}-start-{RANK}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
