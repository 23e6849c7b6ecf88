"""Models that come to prepare wrapped or sharded."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from accelerate_bf16.preparation import Preparation


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_model_wrapped_in_ddp_is_refused_untouched(mode):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"DistributedDataParallel; .* Pass the bare model"):
        Preparation(mode).run([DistributedDataParallel(model)], [])
    assert model.weight.dtype == torch.float32


@pytest.mark.usefixtures("group_of_one")
def test_sharded_model_is_refused_with_the_parameters_name(mode):
    model = nn.Linear(2, 2)
    mesh = DeviceMesh("cpu", [0])
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
    with pytest.raises(NotImplementedError, match="cannot train parameter 'weight', a DTensor"):
        Preparation(mode).run([model], [])
    assert model.bias.dtype == torch.float32
