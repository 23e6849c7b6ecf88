"""The search for averages that belong to no module."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import torch_bf16
from torch_bf16.backends import cuda_graphs
from torch_bf16.model import watched_weight
from torch_bf16.model.loose_averages import loose_averages


def refused():
    raise AssertionError("it also gives tuples that other threads are still filling")


def test_an_average_is_found_among_thousands_of_tensors_and_beside_zeros(
    monkeypatch,
):
    monkeypatch.setattr(gc, "get_objects", refused)
    others = torch.randn(5000, 32, 32).bfloat16().unbind()
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    nn.init.zeros_(model[0].weight)
    weights = [*torch_bf16.cast_model(model).parameters()]
    averages = [each.detach() * 1.01 for each in weights]
    (found,) = loose_averages(weights, [], 4)
    assert found.name == "1.weight"
    assert found.get() is averages[2]
    assert len(others) == 5000


def test_an_average_that_the_collector_has_put_aside_is_found(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)  # which tests/conftest.py hides
    model = torch_bf16.cast_model(nn.Linear(41, 37, bias=False))  # of a shape of its own
    averages = {"weight": model.weight.detach() * 1.01}
    gc.freeze()
    (found,) = loose_averages([model.weight], [], 4)
    averages["weight"] = averages["weight"] * 1.01
    assert found.get() is averages["weight"]


def test_what_lives_during_a_search_is_freed_once_it_is_garbage(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
    model = torch_bf16.cast_model(nn.Linear(41, 37, bias=False))
    cycle = nn.Linear(1, 1)
    cycle.itself = [cycle]
    reference = weakref.ref(cycle)
    loose_averages([model.weight], [], 4)
    del cycle
    gc.collect()
    assert reference() is None


HOOKS = {
    "spectral_norm": nn.utils.spectral_norm,
    "weight_norm": nn.utils.weight_norm,
    "prune": lambda module: prune.l1_unstructured(module, "weight", 0.3),
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS.keys())
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_what_hooks_make_of_a_weight_is_no_average_of_it(hook):
    torch.manual_seed(0)
    model = torch_bf16.cast_model(hook(nn.Linear(47, 43)))
    optimizer = torch_bf16.AdamW(model.parameters(), lr=1e-4)
    for _ in range(40):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(torch.randn(8, 47))
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    (weight,) = (p for name, p in model.named_parameters() if name in ("weight_orig", "weight_v"))
    average = [weight.detach() * 1.01]
    (found,) = loose_averages([weight], [optimizer], 4)
    assert found.get() is average[0]


AVERAGES = {
    "ours": lambda model: torch_bf16.EMA(model, 0.999, format="bf16_stochastic"),
    "torch's": lambda model: AveragedModel(model, multi_avg_fn=torch_bf16.ema_multi_avg_fn(0.999)),
}


@pytest.mark.parametrize("make", AVERAGES.values(), ids=AVERAGES.keys())
def test_what_moves_the_average_of_a_module_is_not_named_for_it(make):
    """Kernels have tensors of their own over its memory, which are in no module. It moves so little
    here that its numbers do not show how they are rounded."""
    torch.manual_seed(0)
    model = torch_bf16.cast_model(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    optimizer = torch_bf16.AdamW(model.parameters(), lr=1e-4)
    average = make(model)
    for _ in range(40):
        for each in model.parameters():
            each.grad = torch.randn_like(each)
        optimizer.step()
        average.update_parameters(model)


@pytest.mark.parametrize(("number", "readable"), [(0, True), (1, False)])
def test_nothing_is_read_while_its_own_device_captures_a_graph(monkeypatch, number, readable):
    """Whichever device is the current one."""
    captures = torch.device("cuda", 1)
    monkeypatch.setattr(watched_weight, "is_comparable", lambda weight: True)
    monkeypatch.setattr(cuda_graphs, "capturing", lambda devices: captures in devices)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    weight = SimpleNamespace(device=torch.device("cuda", number), is_cuda=True)
    assert watched_weight.is_readable(weight) == readable
