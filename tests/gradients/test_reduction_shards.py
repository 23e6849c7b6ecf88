"""bf16 on the wire and fp32 in the sum, over gloo: FSDP2, HSDP, FSDP1, and what is refused."""

import pytest
import reduced_shards as runs
import torch
from ranks import Ranks
from torch.distributed.fsdp import FSDPModule

of_fsdp2 = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"),
    reason="this torch's fully_shard accepts no other reduction, and that is refused",
)


@of_fsdp2
@pytest.mark.parametrize("policy", runs.POLICIES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_fsdp2_has_the_fp32_mean_in_the_order_of_ranks(ranks: Ranks, world, policy):
    ranks(world, runs.run_fsdp2, policy)


@of_fsdp2
@pytest.mark.parametrize("accumulate", ["bf16_nearest", "bf16_stochastic", "fp32"])
def test_fsdp2_sums_micro_batches(ranks: Ranks, accumulate):
    ranks(2, runs.run_fsdp2_micro_batches, accumulate)


@of_fsdp2
def test_hsdp_sums_replicas_in_fp32(ranks: Ranks):
    ranks(4, runs.run_hsdp)


@of_fsdp2
def test_fsdp2_divides_as_told(ranks: Ranks):
    ranks(2, runs.run_divide_factor)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, None], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_fsdp1_has_it_too(ranks: Ranks, strategy, reduce_dtype):
    ranks(3, runs.run_fsdp1, strategy, reduce_dtype)


@of_fsdp2
def test_what_cannot_be_reduced_so_is_refused_by_name(ranks: Ranks):
    ranks(2, runs.run_refusals)


def test_a_recipe_that_nobody_follows_is_named_once(ranks: Ranks):
    ranks(2, runs.run_forgotten)
