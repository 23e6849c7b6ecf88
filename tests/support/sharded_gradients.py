"""Ranks that hold parts of gradients; see tests/gradients/test_sharded_gradients.py."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import torch_bf16

IN_FP32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)


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


class Encoder(nn.Module):
    """Its gradient is its input, whichever method is called."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(16, 16))

    def forward(self, x):
        return (self.w * x).sum()

    def encode(self, x):
        return (self.w * x).sum()


def run_sums_by(method):
    """Many small gradients after a large one, of which torch's own sums would keep none."""
    model = torch_bf16.cast_model(Encoder())
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=IN_FP32)
    register_fsdp_forward_method(model, "encode")
    optimizer = torch_bf16.SGD(model.named_parameters(), lr=0.1)
    handle = torch_bf16.accumulate_gradients(model, optimizer, "bf16_stochastic")
    # A handle of another optimizer comes and goes, and takes nothing with it.
    other = torch_bf16.SGD([nn.Parameter(torch.zeros(1).bfloat16())], lr=0.1)
    torch_bf16.accumulate_gradients(model, other, "bf16_stochastic").remove()

    def total(passes):
        optimizer.zero_grad()
        for number in range(passes):
            call = model if method == "forward" else getattr(model, method)
            call(torch.tensor(2.0**-9 if number else 1.0).bfloat16()).backward()
        return model.w.grad.to_local().double().mean().item()

    # Each addition has a standard deviation of at most half of 2^-7: six of the mean's.
    error = total(101) - (1 + 100 * 2**-9)
    assert abs(error) <= 6 * 10 * 2**-8 / model.w.to_local().numel() ** 0.5
    handle.remove()
    assert total(101) == 1  # the control: what torch does


def run_wire_over_tensor_parallelism():
    """A gain that tensor parallelism replicates is no replica of FSDP2."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    model = torch_bf16.cast_model(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=False)))
    parallelize_module(model, mesh["tp"], {"0": SequenceParallel(), "1": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    reduced_as_it_is(model)


def run_wire_with_ignored_parameters():
    """What ``fully_shard`` leaves alone is left alone."""
    model = torch_bf16.cast_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, ignored_params={model[1].bias})
    reduced_as_it_is(model)


def reduced_as_it_is(model):
    optimizer = torch_bf16.AdamW(model.named_parameters(), lr=0.1)
    torch_bf16.reduce_gradients(model, optimizer)
    sent = []
    exchange = dist.all_to_all_single

    def watched(received, given, **options):
        sent.append(given.dtype)
        return exchange(received, given, **options)

    with mock.patch.object(dist, "all_to_all_single", watched):
        model(torch.ones(2, 4, 8).bfloat16()).sum().backward()
    assert sent == [torch.bfloat16]
    optimizer.step()
