"""What is known of an optimizer's own step: a table of classes, the user's word, and a trial."""

import importlib
import random

import pytest
import torch
from foreign_cases import COUPLED, OWN, Counter, CountsInState, unknown
from optimizer_cases import bits

from torch_bf16 import convert
from torch_bf16.foreign.capabilities import ELEMENTWISE, examine, is_elementwise


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
    traits, group = examine(optimizer), optimizer.param_groups[0]
    assert is_elementwise(kind, group, traits)
    assert not is_elementwise(kind, {**group, "use_gc": True}, traits)
    subclass = OWN["adamax"](optimizer.param_groups[0]["params"])
    assert not is_elementwise(type(subclass), group, examine(subclass))
    assert is_elementwise(type(subclass), group, examine(subclass, elementwise=True))
    assert is_elementwise(type(subclass), group, convert(subclass, elementwise=True)._engine.traits)


class Draws(torch.optim.SGD):
    """Descent with noise, or at times."""

    by_torch = True

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                factor = torch.rand(()) if self.by_torch else random.random()
                p.sub_(p.grad * factor, alpha=group["lr"])


@pytest.mark.parametrize("by_torch", [True, False], ids=["torch", "python"])
def test_a_step_that_draws_random_numbers_is_seen_and_leaves_their_state(by_torch):
    optimizer = Draws([torch.nn.Parameter(torch.ones(3))])
    optimizer.by_torch = by_torch
    before = random.getstate(), torch.get_rng_state()
    assert examine(optimizer).draws
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert not examine(OWN["adamax"]([torch.nn.Parameter(torch.ones(3))])).draws


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
def test_what_couples_parameters_is_seen(make, couples):
    parameters = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(4))]
    assert examine(make(parameters)).couples == couples
