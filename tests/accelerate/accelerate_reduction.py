"""Trainings whose gradients travel in bf16, by Accelerate, as every rank does it."""

from __future__ import annotations

import os
from unittest import mock

from accelerate.utils import gather_object
from fsdp1_on_ranks import flat, flattening
from sharded_llama import assert_same, contents, on_ranks, prepared, train
from torch import distributed as dist


def both_ways(make):
    """What a rank ends with, without and with the option."""
    for reduce in ("", "bf16_wire"):
        exchanges = mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single)
        with exchanges as exchange, mock.patch.dict(os.environ, BF16_REDUCE=reduce):
            made, model, optimizer = make("bf16-stochastic")
            train(made, model, optimizer, range(3))
            assert bool(exchange.call_count) == bool(reduce)
        yield model, optimizer


@on_ranks()
def under_ddp():
    for pair in both_ways(lambda mode: prepared(mode, fsdp=False)):
        found = gather_object([contents(*pair)])
        assert_same(*found)


# The sum of two has one order: what FSDP reduces in fp32 is the same bits.


@on_ranks()
def under_fsdp2():
    assert_same(*[contents(*pair) for pair in both_ways(prepared)])


@flattening()
def under_fsdp1():
    assert_same(*[dict(model.named_parameters()) for model, _ in both_ways(flat)])
