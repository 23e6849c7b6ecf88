"""A training script as people have it: it names no precision and imports nothing of ours."""

import json
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
x = torch.randn(256, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

losses = []
for _ in range(4):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())

if accelerator.is_main_process:
    with open(sys.argv[1], "w") as file:
        json.dump(
            {
                "mode": accelerator.mixed_precision,
                "weights": str(next(model.parameters()).dtype),
                "optimizer": type(optimizer.optimizer).__module__,
                "loss": str(loss.dtype),
                "first": losses[0],
                "last": losses[-1],
            },
            file,
        )
accelerator.end_training()
