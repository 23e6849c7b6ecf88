"""The ranks that run distributed cases: what fails is told of every rank, and hides nothing."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, Ranks


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Of its own, so that others keep what they have compiled."""
    pool = Ranks(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.close()


def summed(number):
    total = torch.tensor(number + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_world_size(), total.item(), torch.rand(()).item()


def fails(how):
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("number 7")
        if how == "dies":
            os._exit(3)
        time.sleep(60)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("raises", "(?s)rank 1: Traceback.*number 7"),
        ("dies", "rank 1: ended with 3"),
        ("hangs", r"(?s)rank 0: .*in barrier.*rank 1: did not end.*in fails"),
    ],
    ids=["raises", "dies", "hangs"],
)
def test_a_failure_is_told_of_every_rank_and_the_next_call_goes_on(pool, how, match):
    pool(2, summed, 0)
    began = time.monotonic()
    with pytest.raises(RankError, match=match) as failure:
        pool(2, fails, how, seconds=2 if how == "hangs" else 60)
    assert failure.value.outcomes[0] != "returned"
    assert time.monotonic() - began < 30
    assert [found[:2] for found in pool(2, summed, 1)] == [(2, 3), (2, 3)]


def test_calls_on_other_numbers_of_ranks_see_new_groups_and_the_same_random_numbers(pool):
    found = [pool(world, summed, 0) for world in (3, 1, 2)]
    for world, results in zip((3, 1, 2), found, strict=True):
        assert [each[:2] for each in results] == [(world, sum(range(world)))] * world
    assert len({each[2] for results in found for each in results}) == 1


def test_a_result_that_cannot_be_sent_fails_its_call_alone(pool):
    with pytest.raises(RankError, match="pickle"):
        pool(1, make_local)
    assert pool(1, summed, 5)[0][:2] == (1, 5)


def make_local():
    return lambda: None
