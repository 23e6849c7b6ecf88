"""What an optimizer's own step writes in place, outside weights, in models of several buckets."""

import random
import threading
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

import torch_bf16


class Writing(torch.optim.Optimizer):
    """Counts its updates in all kinds of objects, and holds what cannot be copied."""

    def __init__(self, params, couples=False, fails=False):
        super().__init__(params, {"lr": 0.5, "log": {"updates": 0}})
        self.couples, self.fails = couples, fails
        self.stats, self.names, self.last = {"deep": [{"updates": 0}]}, set(), deque(maxlen=2)
        self.seen, self.total = np.zeros(1), torch.zeros(())
        self.noise, self.draws = torch.Generator().manual_seed(3), np.random.default_rng(3)
        self.older, self.choices = np.random.RandomState(3), random.Random(3)
        self.lock, self.forever = threading.Lock(), (n for n in iter(int, 1))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            mean = [p.grad.mean() for p in group["params"]] if self.couples else None
            for p in group["params"]:
                group["log"]["updates"] += 1
                self.stats["deep"][0]["updates"] += 1
                self.seen += 1
                self.names.add(tuple(p.shape))
                self.last.append(tuple(p.shape))
                draws = self.draws.random(), self.older.rand(), self.choices.random()
                gradient = p.grad * torch.rand((), generator=self.noise) * sum(draws)
                p -= group["lr"] * (gradient if mean is None else gradient + sum(mean))
                self.state[p].setdefault("log", []).append(len(self.state[p]))
                if self.fails:
                    # As numbers of a parameter, which no call for others would find.
                    self.total = torch.zeros(2)


def start(width=1, **options):
    elementwise = options.pop("elementwise", False)
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(8, 8) for _ in range(6))
    model.append(torch.randn(8))
    optimizer = Writing(model.parameters(), **options)
    model, optimizer = torch_bf16.prepare(
        model, optimizer, "bf16-fp32-master", elementwise=elementwise
    )
    optimizer.bucket_bytes = width
    return model, optimizer


def train(model, optimizer, steps):
    torch.manual_seed(1)
    for _ in range(steps):
        for p in model:
            p.grad = torch.randn(p.shape).bfloat16()
        optimizer.step()


def left(optimizer):
    """What steps have left, without the order of parameters."""
    random_numbers = [
        torch.rand((), generator=optimizer.noise).item(),
        *(optimizer.draws.random(), optimizer.older.rand(), optimizer.choices.random()),
    ]
    counts = [optimizer.stats, optimizer.seen.tolist(), optimizer.param_groups[0]["log"]]
    logs = [state["log"] for state in optimizer.state.values() if "log" in state]
    return [*counts, optimizer.names, random_numbers, logs]


@pytest.mark.parametrize("options", [{"elementwise": True}, {}, {"couples": True}], ids=str)
def test_it_stays_however_many_buckets_there_are(options):
    one, many = start(1 << 20, **options), start(**options)
    objects = many[1].noise, many[1].stats, many[1].seen, many[1].last
    train(*one, 5)
    train(*many, 5)
    assert many[1].seen == 5 * 7
    assert left(one[1]) == left(many[1])
    assert [*map(id, objects)] == [
        id(each) for each in (many[1].noise, many[1].stats, many[1].seen, many[1].last)
    ]


@pytest.mark.parametrize("width", [1, 1 << 20], ids=["several buckets", "one"])
def test_a_refused_step_leaves_nothing(width):
    untouched, refused = start(width), start(width, fails=True)
    with pytest.raises(NotImplementedError, match="keeps tensors in its attribute total"):
        train(*refused, 1)
    assert left(refused[1]) == left(untouched[1])
    assert not refused[1].last


def test_a_first_step_that_raises_leaves_nothing(monkeypatch):
    untouched, failed = start(), start()
    own = Writing.step

    def step(optimizer, closure=None):
        own(optimizer, closure)
        raise FloatingPointError

    monkeypatch.setattr(Writing, "step", step)
    with pytest.raises(FloatingPointError):
        train(*failed, 1)
    assert left(failed[1]) == left(untouched[1])
