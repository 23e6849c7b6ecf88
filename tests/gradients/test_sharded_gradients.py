"""Gradients of which each rank holds a part, over gloo."""

import pytest
import sharded_gradients as runs
import torch
from torch.distributed.fsdp import FSDPModule

of_fsdp2 = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"),
    reason="this torch's fully_shard accepts no other reduction, and that is refused",
)


@pytest.mark.parametrize("wide", [True, False], ids=["even", "a-rank-without-elements"])
def test_an_overflow_in_one_ranks_part_is_one_for_all(ranks, wide):
    ranks(3, runs.run_overflow_on_one_rank, wide)


def test_an_overflow_reaches_ranks_over_both_dimensions_of_a_mesh(ranks):
    ranks(4, runs.run_overflow_on_a_mesh_of_two_dimensions)


@pytest.mark.skipif(
    torch.__version__ < "2.8",
    reason="torch 2.7's FSDP2 sums gradients over gloo where it should average",
)
@pytest.mark.parametrize("method", ["forward", "encode"])
def test_sums_are_ours_whichever_method_of_an_fsdp2_module_is_called(ranks, method):
    ranks(2, runs.run_sums_by, method)


@of_fsdp2
def test_bf16_on_the_wire_over_tensor_parallelism(ranks):
    ranks(4, runs.run_wire_over_tensor_parallelism)


@of_fsdp2
def test_bf16_on_the_wire_beside_ignored_parameters(ranks):
    ranks(2, runs.run_wire_with_ignored_parameters)
