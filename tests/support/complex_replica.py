"""Complex parameters under DDP; see test_complex_gradients.py."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from complex_cases import Waves, real
from torch.nn.parallel import DistributedDataParallel

import torch_bf16


def train(way, real_twin=False):
    """Weights after three steps of two micro-batches each, and of one if gradients are released."""
    options = {"wire": {"reduce": "bf16_wire"}, "sums": {"accumulate": "fp32"}}.get(way, {})
    keep = ("wave", "gain") if real_twin else ()
    recipe = torch_bf16.get_recipe("bf16-fp32-master", compute="fp32", keep_fp32=keep, **options)
    model = Waves(real_twin)
    model, optimizer = torch_bf16.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), recipe
    )
    wrapped = DistributedDataParallel(model)
    if way == "wire":
        torch_bf16.reduce_gradients(wrapped, optimizer)
    elif way == "sums":
        torch_bf16.accumulate_gradients(wrapped, optimizer)
    elif way == "released":
        torch_bf16.release_gradients(wrapped, optimizer)
    for step in range(3):
        for last in (True,) if way in ("released", "ordinary") else (False, True):
            torch.manual_seed(10 * step + 2 * dist.get_rank() + last)
            with nullcontext() if last else wrapped.no_sync():
                wrapped(torch.randn(4, 8)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [real(p) for p in model.parameters()]


def run():
    released, ordinary = train("released"), train("ordinary")
    assert all(map(torch.equal, released, ordinary))
    for way in ("plain", "wire", "sums"):
        if way == "sums" and not hasattr(torch.nn.Parameter(torch.ones(1)), "grad_dtype"):
            continue
        assert all(map(torch.equal, train(way), train(way, real_twin=True))), way
