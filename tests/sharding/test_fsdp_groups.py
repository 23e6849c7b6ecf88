"""A group of FSDP2 has one dtype: what stays in fp32 beside bf16 weights needs one of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from torch_bf16 import Recipe, cast_model

FP32, BF16 = torch.float32, torch.bfloat16


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4)), nn.Linear(4, 2))


def dtypes(module):
    return [{p.dtype for p in each.parameters()} for each in module]


@pytest.mark.parametrize("keep_fp32", [(), ("2",)], ids=["batch-norm", "keep-fp32"])
def test_a_group_of_two_dtypes_is_refused_with_names_and_left_as_it_was(one_rank, keep_fp32):
    module = net()
    if keep_fp32:
        fully_shard(module[1], mesh=one_rank)
    fully_shard(module, mesh=one_rank)
    stays = "2" if keep_fp32 else "1.0"
    said = rf"'0.weight' in torch.bfloat16 and '{stays}.weight' in torch.float32.*Nothing was"
    with pytest.raises(ValueError, match=said):
        cast_model(module, Recipe("own", keep_fp32=keep_fp32))
    assert dtypes(module) == [{FP32}] * 3


def test_a_norm_in_a_group_of_its_own_trains_beside_bf16(one_rank):
    module = net()
    fully_shard(module[1], mesh=one_rank)
    fully_shard(module, mesh=one_rank)
    cast_model(module)
    assert dtypes(module) == [{BF16}, {FP32}, {BF16}]
    with torch.autocast("cpu", BF16):
        module(torch.randn(8, 4)).float().sum().backward()
    assert [p.grad.dtype for p in module.parameters()] == [BF16, BF16, FP32, FP32, BF16, BF16]


def test_a_frozen_norm_may_stay_in_the_group(one_rank):
    module = net()
    module[1].requires_grad_(False)
    fully_shard(module, mesh=one_rank)
    assert dtypes(cast_model(module)) == [{BF16}, {FP32}, {BF16}]


def test_modules_that_are_sharded_together_are_one_group(one_rank):
    module = net()
    fully_shard([module[0], module[1]], mesh=one_rank)
    with pytest.raises(ValueError, match=r"'0.weight' in torch.bfloat16 and '1.0.weight'"):
        cast_model(module)


def test_a_model_that_has_run_is_refused_and_left_as_it_was(one_rank):
    module = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), mesh=one_rank)
    module(torch.ones(2, 4))
    with pytest.raises(ValueError, match="has run already; FSDP settles its dtypes"):
        cast_model(module)
    module.reshard()
    assert dtypes(module) == [{FP32}] * 2


def test_a_model_with_kept_modules_is_cast_again_and_made_fp32_again(one_rank):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for each in (*module, module):
        fully_shard(each, mesh=one_rank)
    for _ in range(2):
        cast_model(module, Recipe("own", keep_fp32=("1",)))
        assert dtypes(module) == [{BF16}, {FP32}]
    assert dtypes(module.float()) == [{FP32}, {FP32}]
