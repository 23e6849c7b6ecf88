"""Runs of ZeroRedundancyOptimizer beside those of DDP by itself."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from sharded_models import make_model
from sharded_training import RECIPES, everywhere, gradient, recipe_of
from torch.nn.parallel import DistributedDataParallel

import torch_bf16

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of functional optimizers, which it imports
    from torch.distributed.optim import ZeroRedundancyOptimizer

BACKWARD = 5
# One weight is large enough for moments in blocks.
SIZES = (64, 70, 4)
NOT_FUSED = type("NotFused", (torch.optim.Adadelta,), {})


def groups_of(model):
    """Matrices, and the rest at another rate: a share of ZeRO's is in another order."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [
        {"params": matrices},
        {"params": [p for p in model.parameters() if p.ndim != 2], "lr": 0.02},
    ]


def converted(params, recipe, zero, model):
    make = torch.optim.AdamW
    made = make(params, lr=0.01) if zero is None else zero(params, make, lr=0.01)
    return torch_bf16.convert(made, recipe)


def named(params, recipe, zero, model):
    make = torch.optim.SGD
    options = {"lr": 0.01, "momentum": 0.9}
    made = make(params, **options) if zero is None else zero(params, make, **options)
    return torch_bf16.convert(made, recipe, model=model)


def cautious(params, recipe, zero, model):
    return converted([{**each, "cautious": True} for each in params], recipe, zero, model)


def own_step(params, recipe, zero, model):
    made = NOT_FUSED(params, lr=0.5) if zero is None else zero(params, NOT_FUSED, lr=0.5)
    return torch_bf16.convert(made, recipe)


def as_bucket_views(params, kind, **options):
    return ZeroRedundancyOptimizer(params, kind, parameters_as_bucket_view=True, **options)


WAYS = {
    "converted": (converted, ZeroRedundancyOptimizer),
    "bucket views": (converted, as_bucket_views),
    "named": (named, ZeroRedundancyOptimizer),
    "cautious": (cautious, ZeroRedundancyOptimizer),
    "own step": (own_step, ZeroRedundancyOptimizer),
}


def make_run(way, recipe, sharded):
    make, zero = WAYS[way]
    model = DistributedDataParallel(torch_bf16.cast_model(make_model(SIZES), recipe))
    torch_bf16.sync_masters(model)
    optimizer = make(groups_of(model), recipe, zero if sharded else None, model)
    return model, optimizer


def train(model, optimizer, steps):
    """On real gradients at first; later on given ones, as a new DDP sums in another order."""
    for step in steps:
        torch.manual_seed(100 * step + dist.get_rank())
        if step < BACKWARD:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(6, SIZES[0])).float().square().mean()
            loss.backward()
        else:
            for name, parameter in model.named_parameters():
                parameter.grad = gradient(name, parameter.shape, step).to(parameter.dtype)
        torch_bf16.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def bits(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).tolist()


def consolidated(zero):
    """Copies of the states of all ranks, on each of them."""
    zero.consolidate_state_dict(to=0)
    saved = [zero.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    # On rank 0 it holds the live tensors, and loading empties what it is given.
    return copy.deepcopy(saved[0])


def assert_same(model, expected, context):
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert bits(one) == bits(other), (context, name)
        replicas = everywhere(bits(one), None)
        assert all(each == replicas[0] for each in replicas), (context, name)


def assert_same_states(found, expected, context):
    assert found.keys() == expected.keys(), (context, found.keys() ^ expected.keys())
    for number, state in expected.items():
        for key, value in state.items():
            other = found[number][key]
            same = bits(value) == bits(other) if torch.is_tensor(value) else value == other
            assert same, (context, number, key)


def run(way, recipe):
    """As DDP by itself; consolidated, loaded into a new run and into the one that goes on."""
    recipe = recipe_of(recipe)
    expected, plain = make_run(way, recipe, sharded=False)
    model, zero = make_run(way, recipe, sharded=True)
    assert len(zero.optim.state) == 0
    train(expected, plain, range(BACKWARD))
    train(model, zero, range(BACKWARD))
    assert_same(model, expected, (way, recipe))
    held = sum(p.numel() for group in zero.optim.param_groups for p in group["params"])
    assert held < sum(p.numel() for p in model.parameters())
    saved = consolidated(zero)
    assert_same_states(saved["state"], plain.state_dict()["state"], (way, recipe))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(expected, plain, range(BACKWARD, 9))

    again, other = make_run(way, recipe, sharded=True)
    train(model, zero, range(2))
    with pytest.raises(RuntimeError, match="state has not been consolidated on this rank"):
        zero.state_dict()
    for its, optimizer in ((again, other), (model, zero)):
        its.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(saved))
        # Saved again before any step.
        assert_same_states(consolidated(optimizer)["state"], saved["state"], (way, recipe))
        train(its, optimizer, range(BACKWARD, 9))
        assert_same(its, expected, (way, recipe, "resumed"))


def refusals():
    model = torch_bf16.cast_model(make_model(SIZES))
    bare = list(model.parameters())
    with pytest.raises(ValueError, match="no supported functional optimizer"):
        ZeroRedundancyOptimizer(bare, torch_bf16.AdamW, overlap_with_ddp=True, lr=0.01)
    overlapping = ZeroRedundancyOptimizer(bare, torch.optim.AdamW, overlap_with_ddp=True, lr=0.01)
    with pytest.raises(NotImplementedError, match="overlap_with_ddp=False"):
        torch_bf16.convert(overlapping)
    with pytest.raises(ValueError, match=r"make that one with a class of torch.optim and call"):
        ZeroRedundancyOptimizer(bare, torch_bf16.AdamW, lr=0.01, recipe=RECIPES[0])
    with pytest.raises(ValueError, match="does not see the parameters of other ranks"):
        torch_bf16.convert(ZeroRedundancyOptimizer(bare, torch_bf16.AdamW, lr=0.01))
    zero = ZeroRedundancyOptimizer(bare, torch.optim.AdamW, lr=0.01)
    for _ in range(2):
        assert torch_bf16.convert(zero, RECIPES[0]) is zero
    with pytest.raises(ValueError, match=r"which holds an AdamW of torch_bf16: pass"):
        torch_bf16.describe(model, zero)
    assert torch_bf16.describe(model, zero.optim).recipe == RECIPES[0]
    with pytest.raises(ValueError, match=r"the AdamW in this ZeroRedundancyOptimizer was made"):
        torch_bf16.convert(zero, RECIPES[1])


def unnamed():
    """At a low rate few numbers of a weight change per step, as in an average that loses some."""
    model = DistributedDataParallel(torch_bf16.cast_model(make_model(SIZES)))
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.002)
    torch_bf16.convert(zero, model=model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no optimizer of torch_bf16 trains it")
        train(model, zero, [0] * 80)
