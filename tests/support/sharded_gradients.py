"""Ranks that hold parts of gradients; see tests/gradients/test_sharded_gradients.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_bf16


def run_overflow_on_one_rank(wide):
    """Every rank skips the step and halves the scale; rows: fewer than ranks leave one without."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = torch_bf16.cast_model(nn.Linear(4, ranks if wide else ranks - 1, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch_bf16.AdamW(model.named_parameters(), lr=0.1)
    scaler = torch_bf16.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    for overflows, scale in ((False, 8.0), (True, 4.0)):
        before = model.weight.to_local().clone()
        scaler.scale(model(torch.ones(2, 4).bfloat16()).sum()).backward()
        if overflows and rank == 0:
            model.weight.grad.to_local()[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = not torch.equal(before, model.weight.to_local())
        assert moved == (not overflows and before.numel() > 0)
        assert scaler.get_scale() == scale
