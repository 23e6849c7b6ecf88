"""What each of two replicas that were initialised differently ends with, by Trainer and Fabric."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning_models import MODES, batches, host, make_module, make_trainer, network, snapshot
from torch.nn import functional as F
from torchrun_variables import as_torchrun_says

RUNS = [
    ("lightning.pytorch", MODES[0]),
    ("lightning.pytorch", MODES[1]),
    ("pytorch_lightning", MODES[1]),
    ("lightning.fabric", MODES[0]),
    ("lightning_fabric", MODES[1]),
]


@as_torchrun_says()
def trained(package, mode, steps, lr):
    """The first weight as this rank made it, and all that it ends with."""
    train = trained_by_fabric if "fabric" in package else trained_by_trainer
    return train(host(package), mode, steps, lr)


def trained_by_trainer(pl, mode, steps, lr):
    rank = dist.get_rank()

    def configure_optimizers(self):
        # Ranks that draw from different generators, before and while they train.
        torch.manual_seed(1000 + rank)
        self.made = [torch.optim.AdamW(self.parameters(), lr=lr)]
        return self.made[0]

    module = make_module(pl, seed=rank, configure_optimizers=configure_optimizers)
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
    trainer.fit(module, batches(10, seed=rank))
    assert trainer.world_size == 2
    assert trainer.global_step == steps
    return first, snapshot(module, module.made[0])


@as_torchrun_says()
def evaluated(package, idle):
    """The fp32 numbers of the first weight: as rank 0 made it, after a fit and after a validation.

    ``idle`` freezes the weight, which takes no step then.
    """
    pl, rank = host(package), dist.get_rank()
    module = make_module(pl, seed=rank)
    weight = module.net[0].weight.requires_grad_(not idle)
    numbers = [make_module(pl, seed=0).net[0].weight.detach()]
    options = {"devices": 2, "use_distributed_sampler": False}
    trainer = make_trainer(
        pl, MODES[1], strategy="ddp_find_unused_parameters_true", max_steps=2, **options
    )
    trainer.fit(module, batches(2, seed=rank))
    numbers.append(module.made[0].exact_weight(weight))
    trainer.validate(module, batches(2), verbose=False)
    return [*numbers, module.made[0].exact_weight(weight)]


def trained_by_fabric(package, mode, steps, lr):
    rank = dist.get_rank()
    fabric = package.Fabric(accelerator="cpu", devices=2, strategy="ddp", precision=mode)
    fabric.launch()
    torch.manual_seed(rank)
    net = network()
    first = net[0].weight.detach().clone()
    adamw = torch.optim.AdamW(net.parameters(), lr=lr)
    if mode == MODES[0]:
        model, optimizer = fabric.setup(net, adamw)
    else:
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(adamw)
    torch.manual_seed(1000 + rank)
    data = list(batches(10, seed=rank))
    for step in range(steps):
        x, y = data[step % len(data)]
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    return first, snapshot(net, adamw)
