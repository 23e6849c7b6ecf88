"""A user's script with Fabric, with no line for bf16 and none about precision at all."""

from __future__ import annotations

import faulthandler

import lightning.fabric
import lightning_fabric
import torch

faulthandler.dump_traceback_later(170)  # the end of a run once took forever

for package in (lightning.fabric, lightning_fabric):
    fabric = package.Fabric()
    model = torch.nn.Linear(4, 2)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, adamw)
    loss = model(torch.ones(2, 4)).square().mean()
    fabric.backward(loss)
    optimizer.step()
    plugin = type(fabric._precision).__module__
    dtypes = {str(p.dtype) for p in model.parameters()}
    print(package.__name__, plugin, type(adamw).__module__, *dtypes, loss.dtype)
