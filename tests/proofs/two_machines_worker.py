"""One rank of a run over machines: ``two_machines_worker.py WAY FOLDER``; ranks as torchrun's.

WAY is ``torch``, ``lightning`` or ``accelerate``, trained with DDP on data of each rank's own, or
``elastic``: given gradients, a checkpoint after each step, and in the first life the machine of
rank 1 is lost: its agent and its worker are killed.
What a rank ends with is written to ``FOLDER/WAY-RANK.json`` as a digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import torch_bf16

MODE, STEPS, DIES_AT = "bf16-fp32-master", 12, 5


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 48), nn.LayerNorm(48), nn.Tanh(), nn.Linear(48, 4))


def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 16, generator=generator)


def loss_of(model, x):
    return model(x).float().square().mean()


def with_torch(folder):
    dist.init_process_group("gloo")
    net = torch_bf16.cast_model(network(), MODE)
    model = nn.parallel.DistributedDataParallel(net)
    torch_bf16.sync_masters(model)
    optimizer = torch_bf16.AdamW(net.named_parameters(), lr=1e-2, recipe=MODE)
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def with_lightning(folder):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, x, number):
            return loss_of(self.net, x)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    here, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    trainer = lightning.Trainer(
        precision=MODE, accelerator="cpu", strategy="ddp", devices=here, num_nodes=world // here,
        max_steps=STEPS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    rank, module = int(os.environ["RANK"]), Module()
    data = [batch(step, rank) for step in range(STEPS)]
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    return module.net, trainer.optimizers[0]


def with_accelerate(folder):
    from accelerate import Accelerator

    accelerator = Accelerator()
    assert accelerator.mixed_precision == MODE
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(net, optimizer)
    for step in range(STEPS):
        accelerator.backward(loss_of(model, batch(step, accelerator.process_index)))
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def elastic(folder):
    """Whatever number of workers there is, given gradients make the same numbers."""
    dist.init_process_group("gloo")
    net = torch_bf16.cast_model(network(), MODE)
    optimizer = torch_bf16.AdamW(net.named_parameters(), lr=1e-2, recipe=MODE)
    path, rank, first = folder / "run.pt", dist.get_rank(), 0
    if path.exists():
        first = torch_bf16.load_checkpoint(path, model=net, optimizer=optimizer)["step"]
    life = {"rank": rank, "world": dist.get_world_size(), "first": first}
    with (folder / "lives").open("a") as lives:
        lives.write(json.dumps(life) + "\n")
    for step in range(first, STEPS):
        generator = torch.Generator().manual_seed(step)
        for parameter in net.parameters():
            given = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = given / dist.get_world_size()
            dist.all_reduce(parameter.grad)
        if rank == 1 and first == 0 and step == DIES_AT:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if rank == 0:
            torch_bf16.save_checkpoint(path, model=net, optimizer=optimizer, step=step + 1)
    return net, optimizer


WAYS = {
    "torch": with_torch,
    "lightning": with_lightning,
    "accelerate": with_accelerate,
    "elastic": elastic,
}


def digest(net, optimizer):
    total = hashlib.sha256()
    for parameter in net.parameters():
        for tensor in (parameter.detach(), *optimizer.state[parameter].values()):
            total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def main(way, folder):
    net, optimizer = WAYS[way](Path(folder))
    found = {"digest": digest(net, optimizer), "world": dist.get_world_size()}
    path = Path(folder, f"{way}-{dist.get_rank()}.json")
    path.write_text(json.dumps({**found, "host": os.environ.get("GLOO_SOCKET_IFNAME", "")}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
