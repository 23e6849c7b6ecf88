"""cast_model and batch norm, whose running statistics torch cannot mix with bf16 gains on CPUs."""

import pytest
import torch
from torch import nn

from torch_bf16 import cast_model

BF16 = torch.bfloat16


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_batch_norm_stays_fp32_and_takes_bf16_activations(dims, training):
    norm = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][dims - 1](4)
    conv = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1](3, 4, 1)
    module = cast_model(nn.Sequential(conv, norm)).train(training)
    assert {p.dtype for p in norm.parameters()} == {torch.float32}
    assert {b.dtype for b in norm.buffers()} == {torch.float32, torch.int64}
    out = module(torch.randn(5, 3, *[4] * dims, dtype=BF16))
    out.float().square().sum().backward()
    assert out.dtype == BF16
    assert conv.weight.grad.dtype == BF16
    assert norm.weight.grad.dtype == torch.float32
    assert norm.weight.grad.isfinite().all()
    assert norm.running_mean.abs().sum() > 0 if training else norm.running_mean.abs().sum() == 0


def test_sync_batch_norm_stays_in_fp32_with_or_without_statistics():
    for stats in (True, False):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=stats))
        model = cast_model(nn.SyncBatchNorm.convert_sync_batchnorm(model))
        assert {each.dtype for each in model[1].parameters()} == {torch.float32}
        assert model[0].weight.dtype == torch.bfloat16


def test_a_batch_norm_without_statistics_is_cast():
    norm = cast_model(nn.BatchNorm1d(3, track_running_stats=False))
    assert norm.weight.dtype == BF16
    assert norm(torch.randn(4, 3, dtype=BF16)).dtype == BF16
