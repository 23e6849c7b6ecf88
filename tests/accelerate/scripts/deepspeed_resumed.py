"""A script that trains, saves, goes on, and does the latter again from what it saved."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

folder = str(Path(sys.argv[1]).with_name("saved"))
accelerator = Accelerator()


def prepared():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.97**n)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
    return accelerator.prepare(model, optimizer, scheduler, loader)


def train(model, optimizer, scheduler, loader):
    losses = []
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def bits(model):
    """What it says, of which the weights are but parts under ZeRO-3."""
    with torch.no_grad():
        found = model(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
    return found.float().tolist()


whole = prepared()
losses = train(*whole)
accelerator.save_state(folder)
losses += train(*whole)
expected = bits(whole[0])
accelerator.free_memory()
again = prepared()
accelerator.load_state(folder)
train(*again)
Path(sys.argv[1]).write_text(
    json.dumps(
        {
            "mode": accelerator.mixed_precision,
            "engine": type(again[0]).__name__,
            "optimizer": type(again[1].optimizer.optimizer).__module__,
            "stage": again[0].zero_optimization_stage(),
            "learned": sum(losses[-4:]) < 0.95 * sum(losses[:4]),
            "resumed": bits(again[0]) == expected,
        }
    )
)
accelerator.end_training()
