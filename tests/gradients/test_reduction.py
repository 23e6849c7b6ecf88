"""bf16 on the wire and fp32 in the sum, over gloo: DDP."""

import pytest
import reduced_gradients as runs
from ranks import Ranks


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_mean_of_ddp_is_the_oracles_whatever_buckets_and_timing(ranks: Ranks, world):
    ranks(world, runs.run_ddp)


def test_groups_reduce_by_themselves(ranks: Ranks):
    ranks(4, runs.run_ddp_in_two_groups)


@pytest.mark.parametrize("world", [2, 3])
def test_ddp_sends_half_the_bytes_of_fp32(ranks: Ranks, world):
    (own, wire), *_ = ranks(world, runs.run_sent_by_ddp)
    numel = 96 * 50 + 50
    share = -(-numel // world)
    assert own == {"allreduce_": 2 * 2 * numel * (world - 1) // world}
    half = 2 * share * (world - 1)
    assert wire == {"alltoall_base_": half, "_allgather_base_": half}


@pytest.mark.parametrize("accumulate", ["bf16_nearest", "bf16_stochastic"])
@pytest.mark.parametrize("sync_always", [False, True])
def test_sums_of_micro_batches_are_reduced(ranks: Ranks, accumulate, sync_always):
    ranks(2, runs.run_micro_batches, accumulate, sync_always)


@pytest.mark.parametrize(
    "run",
    [
        runs.run_second_reduction,
        runs.run_two_optimizers,
        runs.run_backends,
        runs.run_launched,
    ],
    ids=lambda run: run.__name__.removeprefix("run_"),
)
def test_two_ranks(ranks: Ranks, run):
    ranks(2, run)


def test_a_resumed_run_has_the_same_bits_though_ddp_lays_out_its_buckets_anew(ranks: Ranks):
    ranks(3, runs.run_resume)


def test_one_rank(ranks: Ranks):
    ranks(1, runs.run_alone)
