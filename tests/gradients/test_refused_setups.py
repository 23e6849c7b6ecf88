"""A set-up of gradients that is refused leaves everything as it was."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_bf16


def made(**options):
    model = torch_bf16.cast_model(nn.Linear(8, 8, bias=False))
    optimizer = torch_bf16.SGD(model.named_parameters(), lr=0.5)
    return DistributedDataParallel(model, **options), optimizer


def test_an_accumulation_goes_on_if_another_is_refused(one_rank):
    model, optimizer = made(find_unused_parameters=True)
    handle = torch_bf16.accumulate_gradients(model, optimizer, "bf16_stochastic")
    with pytest.raises(ValueError, match="find_unused_parameters"):
        torch_bf16.accumulate_gradients(model, optimizer, "fp32")
    assert optimizer._engine.accumulation is handle
    weight = model.module.weight
    with model.no_sync():
        for number in range(257):
            (model(torch.ones(1, 8).bfloat16()) * (2.0**-9 if number else 1.0)).sum().backward()
    assert weight.grad.float().mean() > 1.25  # torch's own sum would stay at 1
