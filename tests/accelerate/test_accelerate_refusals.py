"""Models that come to prepare wrapped or sharded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from accelerate_bf16.preparation import Preparation


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("by_stock", [False, True])
def test_model_wrapped_in_ddp_is_refused_untouched(mode, compiled, by_stock):
    model = nn.Linear(2, 2)
    wrapper = DistributedDataParallel(model)
    if by_stock:
        wrapper._is_accelerate_prepared = True
    given = torch.compile(wrapper, backend="eager") if compiled else wrapper
    with pytest.raises(ValueError, match=r"DistributedDataParallel; .* Pass the bare model"):
        Preparation(mode).run([given], [])
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("engine", ["XLA", "MEGATRON_LM"])
def test_engines_of_others_are_refused_before_anything_is_cast(
    make_accelerator, monkeypatch, mode, engine
):
    accelerator = make_accelerator(mode)
    monkeypatch.setattr(type(accelerator), "distributed_type", DistributedType(engine))
    model = nn.Linear(2, 2)
    with pytest.raises(NotImplementedError, match=rf"with {engine}: .* What works: one process"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert model.weight.dtype == torch.float32


def test_context_parallelism_is_refused_with_what_works(make_accelerator, monkeypatch, mode):
    accelerator = make_accelerator(mode)
    # A real one asks for several GPUs.
    config = SimpleNamespace(cp_enabled=True)
    monkeypatch.setattr(type(accelerator), "parallelism_config", config, raising=False)
    model = nn.Linear(2, 2)
    with pytest.raises(NotImplementedError, match=r"with context parallelism: .* What works: one"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert model.weight.dtype == torch.float32
    assert accelerator.mixed_precision == mode


def test_device_placement_that_accelerate_refuses_leaves_everything_as_it_was(
    make_accelerator, mode
):
    accelerator, model = make_accelerator(mode), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="should be a list with 2 elements"):
        accelerator.prepare(model, optimizer, device_placement=[True])
    assert (type(optimizer), model.weight.dtype) == (torch.optim.SGD, torch.float32)
    assert accelerator.mixed_precision == mode


@pytest.mark.parametrize(
    ("second", "second_class", "message"),
    [
        (nn.Linear(2, 2), torch.optim.LBFGS, "LBFGS cannot be converted"),
        (nn.LazyLinear(2), torch.optim.SGD, "not initialised"),
        (nn.Linear(2, 2).double(), torch.optim.SGD, r"is torch\.float64"),
    ],
    ids=["optimizer", "lazy", "double"],
)
def test_what_is_refused_beside_another_leaves_both_as_they_were(
    make_accelerator, mode, second, second_class, message
):
    accelerator, first = make_accelerator(mode), nn.Linear(2, 2)
    parameters = [*first.parameters(), *second.parameters()]
    dtypes = [p.dtype for p in parameters]
    optimizers = [torch.optim.SGD(first.parameters()), second_class(second.parameters())]
    with pytest.raises((NotImplementedError, ValueError), match=message):
        accelerator.prepare(first, second, *optimizers)
    assert [type(each) for each in optimizers] == [torch.optim.SGD, second_class]
    assert [p.dtype for p in parameters] == dtypes


@pytest.mark.usefixtures("one_rank")
def test_sharded_model_is_cast_where_it_stands_and_trains(mode):
    """As transformers hands one over that it has sharded while it loaded it."""
    model = fully_shard(nn.Linear(2, 2), mesh=DeviceMesh("cpu", [0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    parameters = list(model.parameters())
    Preparation(mode).run([model], [optimizer])
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    before = model.weight.full_tensor().clone()
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(1, 2)).float().sum().backward()
    optimizer.step()
    assert model.weight.dtype == model.weight.grad.dtype == torch.bfloat16
    assert not torch.equal(model.weight.full_tensor(), before)
