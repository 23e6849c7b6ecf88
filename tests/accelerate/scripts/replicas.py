"""Trains on two ranks with different seeds and writes digests of all that each rank ends with."""

import hashlib
import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from torch_bf16.numerics.rounding import join16

accelerator = Accelerator(gradient_accumulation_steps=2)
rank = accelerator.process_index
torch.manual_seed(rank)
model = torch.nn.Sequential(
    torch.nn.LayerNorm(8), torch.nn.Linear(8, 33), torch.nn.ReLU(), torch.nn.Linear(33, 1)
)
bias = model[1].bias
initial = bias.tolist()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
model, optimizer = accelerator.prepare(model, optimizer)

exact = None
while (step := optimizer.state.get(bias, {}).get("step", 0)) < 50:
    if step == 1 and exact is None:
        # The first step, at a rate of 0, made the masters and left them as they were seeded.
        exact = join16(bias.detach(), optimizer.state[bias]["remainder16"]).tolist()
        optimizer.param_groups[0]["lr"] = 1e-3
    x = torch.randn(16, 8)
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(x), x[:, :1].tanh())
        accelerator.backward(loss)
        dtypes = {str(p.grad.dtype) for p in model.parameters()}
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
result = gather_object([{"digests": digests, "steps": steps, "initial": initial, "exact": exact}])
if accelerator.is_main_process:
    with open(sys.argv[1], "w") as file:
        report = {"mode": accelerator.mixed_precision, "ranks": result, "gradients": sorted(dtypes)}
        json.dump(report, file)
# A process group that DDP still holds when the interpreter ends can abort the process, in any mode.
accelerator.wait_for_everyone()
accelerator.free_memory()
del model, optimizer
accelerator.end_training()
