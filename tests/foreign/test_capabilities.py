"""What is known of an optimizer's own step: by a table, by the user's word, by its first steps."""

import importlib

import pytest
import torch
from foreign_cases import (
    COUPLED,
    OWN,
    Counter,
    CountsInState,
    exact_weights,
    make_run,
    train,
    unknown,
)
from optimizer_cases import bits

from torch_bf16 import convert, prepare
from torch_bf16.foreign.capabilities import ELEMENTWISE, Traits, is_elementwise


def class_of(name):
    module, kind = name.rsplit(".", 1)
    if module.split(".")[0] == "torch":
        return getattr(importlib.import_module(module), kind)
    pytest.importorskip(module.split(".")[0])
    return getattr(importlib.import_module(module), kind)


# Packages of others warn when they are imported.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_a_class_of_the_table_makes_of_parts_what_it_makes_of_the_whole(name):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(5, 257, 33, generator=generator)
    kind = class_of(name)

    def after_steps(numbers):
        weight, *gradients = numbers.clone(memory_format=torch.contiguous_format)
        parameter = torch.nn.Parameter(weight)
        optimizer = kind([parameter], lr=0.01)
        for parameter.grad in gradients:
            optimizer.step()
        return parameter.detach()

    whole = after_steps(numbers)
    assert not torch.equal(whole, numbers[0])
    for rows in (slice(0, 0), slice(0, 100), slice(100, 257)):
        assert torch.equal(bits(after_steps(numbers[:, rows])), bits(whole[rows]))
    assert torch.equal(bits(after_steps(numbers[..., 7:])), bits(whole[:, 7:]))


def test_a_subclass_and_options_over_whole_tensors_are_not_elementwise():
    kind = torch.optim.Adamax
    optimizer = kind([torch.nn.Parameter(torch.ones(3, 2))])
    traits, group = Traits(), optimizer.param_groups[0]
    assert is_elementwise(kind, group, traits)
    assert not is_elementwise(kind, {**group, "use_gc": True}, traits)
    subclass = OWN["adamax"](optimizer.param_groups[0]["params"])
    assert not is_elementwise(type(subclass), group, traits)
    assert is_elementwise(type(subclass), group, Traits(elementwise=True))
    assert is_elementwise(type(subclass), group, convert(subclass, elementwise=True)._engine.traits)


class Logs(torch.optim.SGD):
    """Writes a list of its own, once for each call."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.calls = []

    def step(self, closure=None):
        super().step()
        self.calls.append(len(self.calls))


class HasHelper(torch.optim.SGD):
    """Asks an object that cannot be compared."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.helper = object(), lambda: None, type("Helper", (), {})()


@pytest.mark.parametrize(
    ("make", "couples"),
    [
        *((make, make not in (Counter, CountsInState)) for make in COUPLED.values()),
        (Logs, True),
        (HasHelper, False),
        *((make, False) for make in OWN.values()),
        (unknown(torch.optim.SGD, lr=torch.tensor(0.1)), False),
    ],
    ids=[*COUPLED, "logs", "helper", *OWN, "tensor option"],
)
@pytest.mark.parametrize("bucket_bytes", [1, 64 << 20], ids=["a tensor at a time", "all at once"])
def test_what_couples_parameters_is_seen(make, couples, bucket_bytes):
    model, optimizer = make_run(make, "bf16-stochastic")
    optimizer.bucket_bytes = bucket_bytes
    train(model, optimizer, range(3))
    assert optimizer._engine.traits.couples == couples


calls = 0


class Counts(torch.optim.SGD):
    """Counts its calls wherever that can be, and says so."""

    in_class = 0

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.in_instance = 0

    def step(self, closure=None):
        global calls
        calls += 1
        type(self).in_class += 1
        self.in_instance += 1
        print("step", self.in_instance)
        super().step()


def test_nobody_but_the_user_calls_a_step(capsys, monkeypatch):
    monkeypatch.setitem(globals(), "calls", 0)
    model, optimizer = make_run(Counts, "bf16-stochastic")
    assert (calls, Counts.in_class, optimizer.in_instance, capsys.readouterr().out) == (0, 0, 0, "")
    train(model, optimizer, range(4))
    assert (calls, Counts.in_class, optimizer.in_instance) == (4, 4, 4)
    assert capsys.readouterr().out == "".join(f"step {n}\n" for n in range(1, 5))


class InPlace(torch.optim.SGD):
    """Counts in a tensor that is an option, as capturable ones do, and in a list."""

    def __init__(self, params, where):
        super().__init__(params, lr=torch.tensor(0.1))
        self.where, self.steps = where, [0]

    def step(self, closure=None):
        if self.where == "list":
            self.steps[0] += 1
        if self.where == "option":
            self.param_groups[0]["lr"].mul_(0.9)
        super().step()


class Reads(torch.optim.SGD):
    """Decides in Python by numbers of each parameter, of all before the first is written or not."""

    def __init__(self, params, at_once):
        super().__init__(params, lr=0.1)
        self.at_once = at_once

    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"]]
        norms = [p.grad.norm().item() for p in every] if self.at_once else None
        for p in every:
            p.sub_(p.grad, alpha=0.1 / (1 + (max(norms) if norms else p.grad.norm().item())))


class Replaces(torch.optim.SGD):
    """Gives parameters new memory, with numbers of their own or of another."""

    def __init__(self, params, mixes):
        super().__init__(params, lr=0.1)
        self.mixes = mixes

    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"]]
        for p in every:
            p.data = p - 0.1 * (p.grad + (every[0].mean() if self.mixes else 0))


class WritesUnseen(torch.optim.SGD):
    """Writes through addresses, as kernels of others do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                weight, gradient = p.numpy(), p.grad.numpy()
                weight -= 0.1 * gradient


class CountsParameters(torch.optim.SGD):
    """Numbers the parameters, call by call."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.number = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=0.1 / (1 + self.number))
                self.number += 1


class Skips(torch.optim.SGD):
    """Keeps in an attribute whether it has skipped, as the skip-step classes of OLMo-core do."""

    def __init__(self, params, by_norm):
        super().__init__(params, lr=0.1)
        self.by_norm, self.factor = by_norm, None

    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"]]
        if self.by_norm:
            self.factor = (torch.stack([p.grad.norm() for p in every]).norm() < 0.5).float()
        else:
            self.factor = torch.tensor(1.0) if self.factor is None else 1 - self.factor
        for p in every:
            p.sub_(self.factor * 0.1 * p.grad)


@pytest.mark.parametrize(
    ("make", "couples"),
    [
        (lambda p: Skips(p, by_norm=True), True),
        (lambda p: Skips(p, by_norm=False), False),
        (lambda p: InPlace(p, "list"), True),
        (lambda p: InPlace(p, "option"), True),
        (lambda p: InPlace(p, None), False),
        (lambda p: Reads(p, at_once=True), True),
        (lambda p: Reads(p, at_once=False), False),
        (lambda p: Replaces(p, mixes=True), True),
        (lambda p: Replaces(p, mixes=False), False),
        (WritesUnseen, True),
        (CountsParameters, True),
    ],
)
def test_steps_end_as_in_fp32_whatever_they_couple(make, couples):
    model, optimizer = make_run(make, "bf16-fp32-master")
    optimizer.bucket_bytes = 1
    fp32, reference = make_run(make, None)
    train(model, optimizer, range(5))
    train(fp32, reference, range(5))
    assert optimizer._engine.traits.couples == couples
    for each, value in zip(exact_weights(model, optimizer), fp32.parameters(), strict=True):
        assert torch.equal(bits(each), bits(value))


class Compiled(torch.optim.Optimizer):
    """As nanochat's: its arithmetic is one graph, or an error."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.update = torch.compile(torch.sub, fullgraph=True, backend="eager")

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.update(p, p.grad, alpha=group["lr"]))


def test_a_compiled_step_is_followed_as_it_is_written():
    model = torch.nn.Linear(8, 8, bias=False)
    expected = model.weight.detach() - 0.5
    _, optimizer = prepare(model, Compiled(model.parameters()), "bf16-fp32-master")
    for _ in range(5):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    torch.testing.assert_close(optimizer.exact_weight(model.weight), expected)
