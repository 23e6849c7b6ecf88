"""ZeroRedundancyOptimizer beside DDP by itself through Accelerate, as every rank does it."""

from __future__ import annotations

import os
import warnings
from unittest import mock

import pytest
import torch
from sharded_llama import accelerator, assert_same, loss_of, on_ranks
from tiny_llm import llama

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of functional optimizers, which it imports
    from torch.distributed.optim import ZeroRedundancyOptimizer


def prepared(mode, make, *arguments):
    """With ``device_placement`` Accelerate asks for states, which ZeRO has not, in every mode."""
    made = accelerator(mode, fsdp=False)
    model = llama()
    optimizer = make(model.parameters(), *arguments, lr=1e-2)
    return (made, *made.prepare(model, optimizer, device_placement=[True, False]))


def run(*arguments):
    made, model, optimizer = prepared(*arguments)
    for step in range(3):
        made.backward(loss_of(made, model, step))
        made.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@on_ranks()
def trained(mode):
    model, optimizer = run(mode, torch.optim.AdamW)
    sharded, zero = run(mode, ZeroRedundancyOptimizer, torch.optim.AdamW)
    assert_same(dict(sharded.named_parameters()), dict(model.named_parameters()))
    own = [*zip(sharded.parameters(), model.parameters(), strict=True)]
    own = [(mine, its) for mine, its in own if mine in zero.optimizer.optim.state]
    assert 0 < len(own) < len([*model.parameters()])
    for mine, its in own:
        for key, value in optimizer.state[its].items():
            assert torch.equal(torch.as_tensor(zero.optimizer.optim.state[mine][key]), value), key


@on_ranks()
def refused():
    for variable in ("BF16_ACCUMULATE=fp32", "BF16_REDUCE=bf16_wire", "BF16_RELEASE_GRADIENTS=1"):
        with (
            mock.patch.dict(os.environ, [variable.split("=")]),
            pytest.raises(ValueError, match="as in ZeroRedundancyOptimizer, where each rank steps"),
        ):
            prepared("bf16-stochastic", ZeroRedundancyOptimizer, torch.optim.AdamW)
