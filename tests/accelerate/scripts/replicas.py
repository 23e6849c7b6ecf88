"""Trains on two ranks with different seeds and writes digests of all that each rank ends with."""

import hashlib
import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

accelerator = Accelerator(gradient_accumulation_steps=2)
rank = accelerator.process_index
torch.manual_seed(rank)
model = torch.nn.Sequential(
    torch.nn.LayerNorm(8), torch.nn.Linear(8, 33), torch.nn.ReLU(), torch.nn.Linear(33, 1)
)
initial = model[1].weight.detach().clone()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)

while optimizer.state.get(model.module[1].weight, {}).get("step", 0) < 50:
    x = torch.randn(16, 8)
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(x), x[:, :1].tanh())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

bare = accelerator.unwrap_model(model)
tensors = {f"weight {name}": p.detach() for name, p in bare.named_parameters()}
for name, parameter in bare.named_parameters():
    for key, value in optimizer.state[parameter].items():
        tensors[f"{key} {name}"] = value
digests = {
    name: hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    for name, value in tensors.items()
    if value.ndim
}
steps = [int(optimizer.state[p]["step"]) for p in bare.parameters()]
result = gather_object([{"digests": digests, "steps": steps, "initial": initial.sum().item()}])
if accelerator.is_main_process:
    with open(sys.argv[1], "w") as file:
        json.dump({"mode": accelerator.mixed_precision, "ranks": result}, file)
accelerator.end_training()
