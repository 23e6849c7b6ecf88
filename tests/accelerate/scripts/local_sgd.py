"""Local SGD on two ranks at a small learning rate; writes how far each has moved."""

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import gather_object

torch.manual_seed(0)
accelerator = Accelerator()
model = torch.nn.Linear(64, 32)
start = [p.detach().clone() for p in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
model, optimizer = accelerator.prepare(model, optimizer)
x = torch.ones(4, 64) * (1 + accelerator.process_index)
with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
    for _ in range(64):
        accelerator.backward(-model(x).sum() / 4)
        optimizer.step()
        optimizer.zero_grad()
        local_sgd.step()
bare = accelerator.unwrap_model(model)
pairs = zip(bare.parameters(), start, strict=True)
moved = [(p.detach().float() - old).mean().item() for p, old in pairs]
weights = [p.detach().float().sum().item() for p in bare.parameters()]
ranks = gather_object([{"moved": moved, "weights": weights}])
if accelerator.is_main_process:
    with open(sys.argv[1], "w") as file:
        json.dump(ranks, file)
accelerator.wait_for_everyone()
accelerator.free_memory()
del model, optimizer
accelerator.end_training()
