"""Ranks that reduce-scatter with bf16 on the wire; see tests/gradients/test_reduction_shards.py."""

from unittest import mock

import numpy as np
import oracle
import oracle_formats
import pytest
import torch
import torch.distributed as dist
from reduced_gradients import Model, Sent, bits, gradients, optimizer_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

import torch_bf16

POLICIES = {
    "fp32": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    "bf16": MixedPrecisionPolicy(),
}


class Units(nn.Module):
    """A bf16 unit, and one in fp32 beside it."""

    def __init__(self, with_fp32=True):
        super().__init__()
        self.low = Model()
        del self.low.exact
        self.high = nn.Linear(3, 3, bias=False) if with_fp32 else None

    def forward(self, given):
        low = self.low({name: each for name, each in given.items() if name != "exact"})
        return low.float() if self.high is None else low + self.high(given["exact"][:3]).sum()


def named(optimized):
    return {name.rpartition(".")[2]: p for name, p in optimized.named_parameters()}


def mean(parts):
    return oracle.sum_of_ranks(parts) / np.float32(len(parts))


def expected(name, parts):
    """What FSDP puts into a bf16 ``p.grad``: the mean, rounded to nearest."""
    return oracle_formats.bf16_nearest(mean(parts))


def whole(gradient):
    return bits(gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)


def run_fsdp2(policy):
    """The mean in the order of ranks, rounded once; fp32 units as before."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    mesh = init_device_mesh("cpu", (len(ranks),))
    model = Units()
    fully_shard(model.high, mesh=mesh)
    fully_shard(model, mesh=mesh, mp_policy=POLICIES[policy])
    optimizer = optimizer_of(model)
    torch_bf16.reduce_gradients(model, optimizer)
    torch_bf16.reduce_gradients(model, optimizer)
    for step in (1, 2):
        with Sent(len(ranks)) as sent:
            model(gradients(rank, step)).backward()
        for name, p in named(model.low).items():
            parts = [bits(gradients(each, step)[name]) for each in ranks]
            np.testing.assert_array_equal(whole(p.grad), expected(name, parts), name)
        ones = [gradients(each, step)["exact"][:3] for each in ranks]
        torch.testing.assert_close(
            model.high.weight.grad.full_tensor()[0], torch.stack(ones).mean(0)
        )
        torch_bf16.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    others, n = len(ranks) - 1, len(ranks)
    padded = [-(-p.shape[0] // n) * p[0].numel() for p in Model().parameters()]
    exact = Model().exact.numel() // 6 * -(-6 // n)
    assert sent.bytes["alltoall_base_"] == 2 * others * (sum(padded) - exact)
    assert sent.bytes["_reduce_scatter_base_"] == 4 * others * 3 * -(-3 // n)


def run_fsdp2_micro_batches(accumulate):
    """Without synchronisation FSDP2 sums in fp32; with it, shards are summed as asked."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    for synchronised in (True, False):
        model = Units(with_fp32=False)
        mesh = init_device_mesh("cpu", (len(ranks),))
        fully_shard(model, mesh=mesh, mp_policy=POLICIES["fp32"])
        optimizer = optimizer_of(model, accumulate=accumulate)
        torch_bf16.accumulate_gradients(model, optimizer)
        torch_bf16.reduce_gradients(model, optimizer)
        for number in range(2):
            model.set_requires_gradient_sync(synchronised or number == 1)
            model(gradients(rank, 1, number)).backward()
        for name, p in named(model).items():
            each = [[gradients(r, 1, number)[name].float() for r in ranks] for number in range(2)]
            if synchronised:
                means = [mean([bits(g.bfloat16()) for g in some]) for some in each]
                rounded = [
                    oracle_formats.bf16_to_fp32(oracle_formats.bf16_nearest(term)) for term in means
                ]
                if accumulate == "fp32":
                    found = p.grad.full_tensor()
                    # Torch 2.15 heeds p.grad's dtype; older ones round what each pass has reduced.
                    assert any(
                        torch.equal(found, torch.from_numpy(sum(terms)))
                        for terms in (rounded, means)
                    )
            else:
                parts = [bits((a + b).bfloat16()) for a, b in zip(*each, strict=True)]
                found = whole(p.grad.to(torch.bfloat16))
                np.testing.assert_array_equal(found, expected(name, parts), name)


def run_hsdp():
    """Shards are summed by us, and replicas of them in fp32 by FSDP2."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = Units(with_fp32=False)
    fully_shard(model, mesh=mesh, mp_policy=POLICIES["fp32"])
    torch_bf16.reduce_gradients(model, optimizer_of(model))
    with Sent(2) as sent:
        model(gradients(rank, 1)).backward()
    for name, p in named(model).items():
        parts = [bits(gradients(each, 1)[name]) for each in range(4)]
        halves = [mean(parts[:2]), mean(parts[2:])]
        of_all = oracle_formats.bf16_nearest((halves[0] + halves[1]) / np.float32(2))
        np.testing.assert_array_equal(whole(p.grad), of_all, name)
    shards = sum(
        -(-p.shape[0] // 2) * p[0].numel() for n, p in named(Model()).items() if n != "exact"
    )
    assert sent.bytes["alltoall_base_"] == 2 * shards
    assert sent.bytes["allreduce_"] == 4 * shards
    other = fully_shard(Units(with_fp32=False), mesh=mesh, mp_policy=POLICIES["bf16"])
    with pytest.raises(ValueError, match=r"replicas in bf16.*reduce_dtype=torch\.float32"):
        torch_bf16.reduce_gradients(other, optimizer_of(other))


def run_divide_factor():
    """Factors that FSDP2 is told are applied to the fp32 sum."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    for factor, force in ((1.0, False), (4.0, False), (2.0, False), (8.0, True)):
        model = Units(with_fp32=False)
        mesh = init_device_mesh("cpu", (len(ranks),))
        fully_shard(model, mesh=mesh, mp_policy=POLICIES["fp32"])
        model.set_gradient_divide_factor(factor)
        model.set_force_sum_reduction_for_comms(force)
        torch_bf16.reduce_gradients(model, optimizer_of(model))
        model(gradients(rank, 1)).backward()
        parts = [bits(gradients(each, 1)["wide"]) for each in ranks]
        divided = oracle_formats.bf16_nearest(oracle.sum_of_ranks(parts) / np.float32(factor))
        np.testing.assert_array_equal(whole(named(model)["wide"].grad), divided)


def run_fsdp1(strategy, reduce_dtype):
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    model = FullyShardedDataParallel(
        Units(with_fp32=False),
        sharding_strategy=ShardingStrategy[strategy],
        mixed_precision=MixedPrecision(reduce_dtype=reduce_dtype),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = optimizer_of(model)
    torch_bf16.reduce_gradients(model, optimizer)
    torch_bf16.reduce_gradients(model, optimizer)
    for step in (1, 2):
        with Sent(len(ranks)) as sent:
            model(gradients(rank, step)).backward()
        numel = sum(p.numel() for n, p in Model().named_parameters() if n != "exact")
        # FSDP1 fills parameters up to 16 bytes.
        surplus = sent.bytes["alltoall_base_"] / (2 * (len(ranks) - 1) / len(ranks)) - numel
        assert 0 <= surplus < 8 * 5
        assert "_reduce_scatter_base_" not in sent.bytes
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            for name, p in named(model).items():
                parts = [bits(gradients(each, step)[name]) for each in ranks]
                np.testing.assert_array_equal(bits(p.grad), expected(name, parts), name)
        optimizer.step()
        optimizer.zero_grad()


def run_refusals():
    mesh, cpu = init_device_mesh("cpu", (2,)), torch.device("cpu")

    def refused(model, error, match):
        with pytest.raises(error, match=match):
            torch_bf16.reduce_gradients(model, torch_bf16.SGD(model.parameters(), lr=0.1))

    refused(Model(), ValueError, "found nothing in Model that reduces gradients over the 2 ranks")
    hooked = DistributedDataParallel(Model())
    hooked.register_comm_hook(None, lambda state, bucket: None)
    refused(hooked, ValueError, r"one communication hook, and this one has that of .*<lambda>")
    released = DistributedDataParallel(Model())
    optimizer = torch_bf16.SGD(released.parameters(), lr=0.1)
    torch_bf16.release_gradients(released, optimizer)
    refused(released, ValueError, r"that of released gradients \(call release_gradients last\)")
    with pytest.raises(ValueError, match="that of released gradients"):
        torch_bf16.accumulate_gradients(released, optimizer, "fp32")
    summed = DistributedDataParallel(Model())
    torch_bf16.accumulate_gradients(summed, torch_bf16.SGD(summed.parameters(), lr=0.1), "fp32")
    refused(summed, ValueError, "'bf16_stochastic' has none")
    wired = DistributedDataParallel(Model())
    optimizer = torch_bf16.SGD(wired.parameters(), lr=0.1)
    torch_bf16.reduce_gradients(wired, optimizer)
    with pytest.raises(ValueError, match="that of reduce='bf16_wire': leave it out, or"):
        torch_bf16.accumulate_gradients(wired, optimizer, "fp32")
    with pytest.raises(ValueError, match=r"reduce_gradients was given an SGD, .*by a recipe"):
        torch_bf16.reduce_gradients(wired, torch.optim.SGD(wired.parameters(), lr=0.1))
    options = {"use_orig_params": True, "device_id": cpu}
    no_shard = FullyShardedDataParallel(
        Units(with_fp32=False), sharding_strategy=ShardingStrategy.NO_SHARD, **options
    )
    refused(no_shard, NotImplementedError, "no hook with NO_SHARD")
    mixed = Units()
    mixed.high = FullyShardedDataParallel(mixed.high, **options)
    refused(FullyShardedDataParallel(mixed, **options), NotImplementedError, "units are in fp32")
    inner = Units(with_fp32=False)
    inner.low = FullyShardedDataParallel(inner.low, process_group=dist.new_group([0, 1]), **options)
    apart = FullyShardedDataParallel(inner, **options)
    refused(apart, NotImplementedError, "sharded over several process groups")
    hooked = FullyShardedDataParallel(Units(with_fp32=False), **options)
    hooked.register_comm_hook(None, lambda state, *gradients: None)
    refused(hooked, NotImplementedError, "it has a communication hook already")
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicated = replicate(Units(with_fp32=False), mesh=mesh)
    refused(replicated, NotImplementedError, "parameters are replicated")
    flattened = FullyShardedDataParallel(Units(with_fp32=False), **options)
    lacking = RuntimeError("Backend mine does not support alltoall_base")
    with mock.patch.object(dist, "all_to_all_single", side_effect=lacking):
        for wrapped in (
            DistributedDataParallel(Model()),
            fully_shard(Model().bfloat16(), mesh=mesh),
            flattened,
        ):
            refused(wrapped, NotImplementedError, "'gloo' has no all-to-all on cpu")
    assert flattened._comm_hook is None
    old = fully_shard(Model().bfloat16(), mesh=mesh)
    with mock.patch.object(FSDPModule, "set_custom_reduce_scatter"):
        del FSDPModule.set_custom_reduce_scatter
        refused(old, NotImplementedError, "accepts no other reduction in torch")


def run_forgotten():
    """A recipe that asks for it, and nobody has made it so: said once."""
    with mock.patch("torch_bf16.optim.planning._logger") as logger:
        for reduced in (False, True):
            model = DistributedDataParallel(Model())
            optimizer = optimizer_of(model)
            if reduced:
                torch_bf16.reduce_gradients(model, optimizer)
            for step in (1, 2):
                model(gradients(dist.get_rank(), step)).backward()
                optimizer.step()
    (call,) = logger.warning.call_args_list
    assert "reduce_gradients(model" in call.args[0]
