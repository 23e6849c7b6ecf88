"""Data-parallel and sharded training on whatever device a rank has; see test_gpu_ranks.py."""

import torch
import torch.distributed as dist
from optimizer_cases import bits, snapshot
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_bf16


def network(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 3)).to(device)


def prepared(model, recipe, backend):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return torch_bf16.prepare(model, optimizer, recipe, backend=backend)


def train(model, optimizer, device):
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(8, 24, generator=generator).to(device, torch.bfloat16)
        model(x).float().square().mean().backward()
        torch_bf16.clip_next_step(optimizer, 1.0)
        optimizer.step()
        # Gradients at other addresses in the next step.
        optimizer.zero_grad(set_to_none=True)


def on_host(states):
    return [{key: tensor.cpu() for key, tensor in state.items()} for state in states]


def ddp(device, recipe, backend):
    """The bits of a rank's replica."""
    bare, optimizer = prepared(network(device), recipe, backend)
    train(DistributedDataParallel(bare), optimizer, device)
    return on_host(snapshot(optimizer))


def fsdp2(device, recipe, backend):
    """The bits of all weights, gathered."""
    model = network(device)
    before = [p.detach().clone() for p in model.parameters()]
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    model, optimizer = prepared(model, recipe, backend)
    train(model, optimizer, device)
    found = [p.full_tensor() for p in model.parameters()]
    pairs = zip(before, found, strict=True)
    assert not any(torch.equal(then.bfloat16(), now) for then, now in pairs)
    return [{"weight": bits(each).cpu()} for each in found]
