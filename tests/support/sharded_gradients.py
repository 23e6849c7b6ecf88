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
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import torch_bf16

IN_FP32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)


def run_overflow_on_one_rank(wide):
    """Every rank skips the step and halves the scale; rows: fewer than ranks leave one without."""
    ranks = dist.get_world_size()
    model = torch_bf16.cast_model(nn.Linear(4, ranks if wide else ranks - 1, bias=False))
    skips_together(fully_shard(model, mesh=init_device_mesh("cpu", (ranks,))))


def run_overflow_on_a_mesh_of_two_dimensions():
    """The rank that shares no row and no column with it skips the step, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = torch_bf16.cast_model(nn.Linear(4, 4, bias=False))
    parallelize_module(model, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    skips_together(fully_shard(model, mesh=mesh["dp"]))


def skips_together(model):
    rank = dist.get_rank()
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
    """Both gradients are its input, whichever method is called."""

    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(torch.zeros(16, 16))
        self.w = nn.Parameter(torch.zeros(16, 16))

    def forward(self, x):
        return ((self.v + self.w) * x).sum()

    def encode(self, x):
        return self.forward(x)


def run_sums_by(method):
    """Many small gradients after a large one, of which torch's own sums would keep none.

    Two optimizers share a unit of FSDP2.
    """
    model = torch_bf16.cast_model(Encoder())
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=IN_FP32)
    register_fsdp_forward_method(model, "encode")
    optimizers = [torch_bf16.SGD([each], lr=0.1) for each in model.named_parameters()]
    handles = [
        torch_bf16.accumulate_gradients(model, each, "bf16_stochastic") for each in optimizers
    ]
    # A handle of another optimizer comes and goes, and takes nothing with it.
    other = torch_bf16.SGD([nn.Parameter(torch.zeros(1).bfloat16())], lr=0.1)
    torch_bf16.accumulate_gradients(model, other, "bf16_stochastic").remove()

    def totals(passes):
        model.zero_grad()
        for number in range(passes):
            call = model if method == "forward" else getattr(model, method)
            call(torch.tensor(2.0**-9 if number else 1.0).bfloat16()).backward()
        return [p.grad.to_local().double().mean().item() for p in model.parameters()]

    # Each addition has a standard deviation of at most half of 2^-7: six of the mean's.
    bound = 6 * 10 * 2**-8 / model.w.to_local().numel() ** 0.5
    assert all(abs(total - (1 + 100 * 2**-9)) <= bound for total in totals(101))
    for handle in handles:
        handle.remove()
    assert totals(101) == [1, 1]  # the control: what torch does


def run_wire_over_tensor_parallelism():
    """A gain that tensor parallelism replicates is no replica of FSDP2."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    model = torch_bf16.cast_model(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=False)))
    parallelize_module(
        model, mesh["tp"], {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1))}
    )
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
