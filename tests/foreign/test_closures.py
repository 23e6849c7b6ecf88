"""What a converted optimizer's step is given: a closure, evaluated once, and nothing else."""

import copy

import pytest
import torch
from foreign_cases import exact_weights, make_run
from optimizer_cases import bits

import torch_bf16


class CallsFirst(torch.optim.SGD):
    """Evaluates the closure, if it gets one, and takes smaller steps where the loss is smaller."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                rate = group["lr"] * (1 if loss is None else min(1.0, float(loss)))
                p.sub_(p.grad, alpha=rate)
        return loss


class CallsAfterItHasMoved(torch.optim.SGD):
    """Ascends before it evaluates, if it gets a closure, as bSAM does; if not, it only descends."""

    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"]]
        if closure is not None:
            for p in every:
                p.add_(p.grad, alpha=0.1)
            with torch.enable_grad():
                closure()
        for p in every:
            p.sub_(p.grad, alpha=0.1)


class MovesByTheClosure(CallsAfterItHasMoved):
    """The same, and it says that it needs one."""

    def step(self, closure=None):
        if closure is None:
            raise ValueError("step() was given no closure")
        super().step(closure)


def steps(model, optimizer, count=5):
    calls = []

    def closure():
        calls.append(1)
        for number, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * len(calls) + number)
            gradient = torch.randn(p.shape, generator=generator).to(torch.bfloat16)
            p.grad = gradient.to(p.dtype)
        return torch.tensor(1.0 / len(calls))

    returned = [float(optimizer.step(closure)) for _ in range(count)]
    assert returned == [float(torch.tensor(1.0 / (n + 1))) for n in range(count)]
    assert len(calls) == count


def test_the_own_step_sees_the_loss_of_a_closure_that_is_evaluated_once():
    runs = []
    for recipe in (None, "bf16-fp32-master"):
        model, optimizer = make_run(lambda p: CallsFirst(p, lr=0.1), recipe)
        if recipe:
            optimizer.bucket_bytes = 1
        steps(model, optimizer)
        runs.append((model, optimizer))
    (fp32, _), (model, optimizer) = runs
    expected = [bits(p) for p in fp32.parameters()]
    assert all(map(torch.equal, map(bits, exact_weights(model, optimizer)), expected))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert optimizer.step() is None


@pytest.mark.parametrize("kind", [CallsAfterItHasMoved, MovesByTheClosure])
def test_a_step_that_evaluates_the_model_with_other_weights_is_refused_by_name(kind):
    model, optimizer = make_run(lambda p: kind(p, lr=0.1), "bf16-stochastic")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NotImplementedError, match="evaluates the closure with other weights"):
        steps(model, optimizer, 1)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    if kind is CallsAfterItHasMoved:
        optimizer.step()  # without a closure it descends
        assert not torch.equal(model[0].weight, before["0.weight"])


def test_a_closure_that_fails_leaves_the_next_step_without_one():
    model, optimizer = make_run(lambda p: CallsFirst(p, lr=0.1), "bf16-stochastic")
    steps(model, optimizer, 1)

    def failing():
        raise KeyError("batch")

    with pytest.raises(KeyError, match="batch"):
        optimizer.step(failing)
    assert optimizer.step() is None


class Batched(torch.optim.SGD):
    """As Sophia's step takes the batch's size."""

    def step(self, closure=None, *, size=1):
        return super().step(closure)


def test_what_a_step_is_given_beside_a_closure_is_refused_by_name():
    model = torch.nn.Linear(4, 4)
    optimizer = Batched(model.parameters(), lr=0.1)
    model, optimizer = torch_bf16.prepare(model, optimizer, "bf16-stochastic")
    model.weight.grad = torch.ones_like(model.weight)
    before = model.weight.detach().clone()
    with pytest.raises(TypeError, match="given size, and that of a converted Batched takes a clos"):
        optimizer.step(size=2)
    assert torch.equal(model.weight, before)
    optimizer.step()
    assert not torch.equal(model.weight, before)
