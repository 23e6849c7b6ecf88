"""torch's averages of replicas move weights as far as in fp32, and leave replicas alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.algorithms.model_averaging import utils as averaging

import torch_bf16

STEPS, PERIOD, LR = 64, 8, 1e-5


def post_local_sgd(optimizer):
    from torch.distributed.optim import PostLocalSGDOptimizer

    averager = averagers.PeriodicModelAverager(period=PERIOD, warmup_steps=0)
    return PostLocalSGDOptimizer(optim=optimizer, averager=averager).step


def by_function(optimizer):
    steps = 0

    def step():
        nonlocal steps
        optimizer.step()
        if steps % PERIOD == 0:
            averaging.average_parameters(iter(optimizer.param_groups[0]["params"]), None)
        steps += 1

    return step


def trained(recipe, make_step):
    """How far a matrix and a vector move, and the bits of all that this rank ends with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    if recipe is not None:
        torch_bf16.prepare(model, optimizer, recipe)
    step = make_step(optimizer)
    for _ in range(STEPS):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + 0.5 * dist.get_rank())
        step()
    averaging.average_parameters(model.parameters(), None)
    exact = [
        p.detach() if recipe is None else optimizer.exact_weight(p) for p in model.parameters()
    ]
    moved = [(before - p).mean().item() for before, p in zip(start, exact, strict=True)]
    return moved, [each.view(torch.int32).tolist() for each in exact]


@pytest.mark.parametrize("make_step", [post_local_sgd, by_function])
@pytest.mark.parametrize(("recipe", "rel"), [("bf16-stochastic", 0.02), ("bf16-fp32-master", 1e-3)])
def test_averages_of_replicas_move_weights_as_far_as_in_fp32(ranks, recipe, rel, make_step):
    """By ``p.data`` 60 % of the movement were lost."""
    (fp32, _), _ = ranks(2, trained, None, make_step)
    (first, bits), (second, others) = ranks(2, trained, recipe, make_step)
    assert first == pytest.approx(fp32, rel=rel)
    assert first == second
    assert bits == others


def after_steps(recipe, steps):
    """The bits of this rank's weights after an average; each rank has taken its number of steps."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch_bf16.prepare(model, optimizer, recipe)
    for _ in range(steps[dist.get_rank()]):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    averaging.average_parameters(model.parameters(), None)
    return [p.detach().view(torch.int16).tolist() for p in model.parameters()]


@pytest.mark.parametrize("steps", [(3, 2), (1, 0)])
@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])
def test_replicas_with_other_numbers_of_steps_end_alike(ranks, recipe, steps):
    """One without a step has no states yet."""
    first, second = ranks(2, after_steps, recipe, steps)
    assert first == second


def outside_of_the_group(recipe):
    """Rank 1 is not in the group, and keeps its own numbers."""
    alone = dist.new_group([0])
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    torch_bf16.prepare(model, optimizer, recipe)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = [optimizer.exact_weight(p) for p in model.parameters()]
    averaging.average_parameters(model.parameters(), alone)
    return all(map(torch.equal, before, map(optimizer.exact_weight, model.parameters())))


def test_a_rank_outside_of_the_group_averages_nothing(ranks):
    assert ranks(2, outside_of_the_group, "bf16-fp32-master") == [True, True]
