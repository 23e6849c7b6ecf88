"""What cast_model leaves as it is, in models that others have half prepared."""

import pytest
import torch
from torch import nn

from torch_bf16 import cast_model


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8], ids=str)
def test_what_is_frozen_in_another_dtype_is_left_alone(dtype):
    model = nn.ModuleDict({"teacher": nn.Linear(3, 3), "student": nn.Linear(3, 3)})
    model["teacher"].weight = nn.Parameter(torch.ones(3, 3, dtype=dtype), requires_grad=False)
    cast_model(model)
    assert model["teacher"].weight.dtype == dtype
    assert model["student"].weight.dtype == torch.bfloat16


def test_batch_norm_whose_statistics_were_switched_off_stays_whole():
    # What Lightning's BaseFinetuning.freeze(train_bn=False) does.
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[1].track_running_stats = False
    cast_model(model)
    assert model[1].weight.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert model.eval()(torch.randn(2, 3)).isfinite().all()
