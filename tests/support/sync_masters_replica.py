"""DDP over ranks that were initialised differently, and their masters; see test_remainders.py."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_bf16
from torch_bf16.numerics.rounding import join16

RECIPES = {
    "bf16+16": torch_bf16.get_recipe("bf16-fp32-master"),
    "bf16+fp32": torch_bf16.Recipe(
        "master32", weights="bf16+fp32", exp_avg="fp32", exp_avg_sq="fp32"
    ),
}


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    with torch.no_grad():
        for p in module.parameters():
            # Half of the weights as from an fp16 model: an eighth of those are ties.
            p.view(-1)[::2] = p.view(-1)[::2].half().float()
    return module


def clones(tensors) -> list[torch.Tensor]:
    return [t.detach().clone() for t in tensors]


def masters(optimizer) -> list[torch.Tensor]:
    return [
        s["master"].clone() if "master" in s else join16(p, s["remainder16"])
        for p, s in optimizer.state.items()
    ]


def initial() -> list[torch.Tensor]:
    return clones(network(dist.get_rank()).parameters())


def trained(scenario: str, kind: str) -> dict[str, list[torch.Tensor]]:
    rank = dist.get_rank()
    module = network(rank)
    torch_bf16.cast_model(module, RECIPES[kind])
    if scenario == "uneven" and rank == 0:
        module[0].weight.data.zero_()
    if scenario == "uneven" and rank == 1:
        # A copy knows nothing of the cast: this rank has no halves of its own.
        module = copy.deepcopy(module)
    if scenario.startswith("broadcast"):
        # The old idiom: .data hides the write.
        for p in module.parameters():
            dist.broadcast(p.data.view(torch.uint8), 0)
        replica = DistributedDataParallel(module, init_sync=False)
    else:
        replica = DistributedDataParallel(module)
    if scenario not in ("plain ddp", "broadcast alone"):
        torch_bf16.sync_masters(replica)
    optimizer = torch_bf16.AdamW(module.parameters(), lr=0.0, recipe=RECIPES[kind])
    found = {"weights at the start": clones(module.parameters())}
    torch.manual_seed(100 + rank)
    for step in range(6):
        optimizer.zero_grad()
        replica(torch.randn(5, 8).bfloat16()).float().square().mean().backward()
        optimizer.step()
        if step == 0:
            found["masters at the start"] = masters(optimizer)
            optimizer.param_groups[0]["lr"] = 1e-2
    found["weights"] = clones(module.parameters())
    found["states"] = clones(v for s in optimizer.state.values() for v in s.values())
    return found


def started_in_a_group(kind: str) -> list[torch.Tensor] | None:
    """The masters of replicas on ranks 1 and 2; rank 0 has none of them."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    module = torch_bf16.cast_model(network(dist.get_rank()), RECIPES[kind])
    replica = DistributedDataParallel(module, process_group=group)
    torch_bf16.sync_masters(replica)
    optimizer = torch_bf16.AdamW(module.parameters(), lr=0.0, recipe=RECIPES[kind])
    replica(torch.randn(5, 8).bfloat16()).float().square().mean().backward()
    optimizer.step()
    return masters(optimizer)
