"""Wrappers of other libraries around our optimizers: shared states, and weights moved by a step."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16 import torch_patches

ADAMW = partial(torch_bf16.AdamW, recipe="bf16-fp32-master")


class SAM(torch.optim.Optimizer):
    """Shares groups and states with its base and moves weights in place, as pytorch_optimizer's."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.state = self.base_optimizer.state

    @torch.no_grad()
    def step(self, closure):
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.float().norm() for p in every]).norm()
        for p in every:
            self.state[p]["old"] = p.clone()
            p.add_((p.grad * (self.param_groups[0]["rho"] / norm)).to(p.dtype))
        with torch.enable_grad():
            closure()
        for p in every:
            p.copy_(self.state[p].pop("old"))
        self.base_optimizer.step()

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups
        self.base_optimizer.state = self.state


class Returning(SAM):
    """Subtracts again what it has added, which bf16 rounds, and shares no states."""

    def __init__(self, params, base, **options):
        super().__init__(params, base, **options)
        self.state = {}

    @torch.no_grad()
    def step(self, closure):
        every = [p for group in self.param_groups for p in group["params"]]
        moves = [(p.grad / p.grad.norm() * 0.005).to(p.dtype) for p in every]
        torch._foreach_add_(every, moves)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(every, moves)
        self.base_optimizer.step()

    def state_dict(self):
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.base_optimizer.load_state_dict(state_dict)


def make(kind, base):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 1))
    if base is not torch.optim.AdamW:
        torch_bf16.cast_model(model, "bf16-fp32-master")
    optimizer = kind(model.parameters(), base, lr=1e-3)
    if base is torch.optim.AdamW:
        torch_bf16.prepare(model, optimizer.base_optimizer, "bf16-fp32-master")
    return model, optimizer


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))

        def closure(x=x):
            optimizer.zero_grad()
            (model(x.bfloat16()).float() - x[:, :1]).square().mean().backward()

        closure()
        optimizer.step(closure)


@pytest.mark.parametrize("base", [torch.optim.AdamW, ADAMW], ids=["converted", "ours"])
@pytest.mark.parametrize("kind", [SAM, Returning])
def test_a_run_that_a_wrapper_saves_and_loads_has_the_bits_of_an_uninterrupted_one(kind, base):
    model, optimizer = make(kind, base)
    train(model, optimizer, range(8))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(8, 16))
    again, resumed = make(kind, base)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(again, resumed, range(8, 16))
    ours, theirs = optimizer.base_optimizer, resumed.base_optimizer
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours.exact_weight(one), theirs.exact_weight(other))
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(ours.state[one][key], theirs.state[other][key])


@pytest.mark.parametrize("base", [torch.optim.AdamW, ADAMW], ids=["converted", "ours"])
def test_a_wrapper_that_shares_states_saves_and_loads_what_the_wrapped_optimizer_does(base):
    model, optimizer = make(SAM, base)
    train(model, optimizer, range(3))
    saved, expected = optimizer.state_dict(), optimizer.base_optimizer.state_dict()
    assert saved["torch_bf16"] == expected["torch_bf16"]
    assert saved["state"][0]["remainder16"].dtype == torch.bfloat16  # bits, seen as numbers
    _, resumed = make(SAM, base)
    resumed.load_state_dict(saved)
    assert resumed.state is resumed.base_optimizer.state
    moment = resumed.state[resumed.param_groups[0]["params"][0]]["exp_avg"]
    assert torch.equal(moment, expected["state"][0]["exp_avg"])
    assert moment.dtype == torch.float32


def test_a_wrapper_that_numbers_parameters_in_its_own_way_saves_states_by_its_own_numbers():
    model, optimizer = make(SAM, ADAMW)
    train(model, optimizer, range(3))
    (group,) = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": group["params"][::-1]}]
    saved = optimizer.state_dict()
    for number, p in enumerate(optimizer.param_groups[0]["params"]):
        assert torch.equal(saved["state"][number]["exp_avg"], optimizer.state[p]["exp_avg"])


def test_a_state_dict_of_another_model_leaves_a_wrapper_as_it_was():
    model, optimizer = make(SAM, torch.optim.AdamW)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(3)
    before = optimizer.state
    with pytest.raises(torch_bf16.StateMismatchError, match="exp_avg"):
        optimizer.load_state_dict(saved)
    assert optimizer.state is before


def test_a_wrapper_saved_in_fp32_continues_in_a_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 1)).bfloat16().float()
    optimizer = SAM(model.parameters(), torch.optim.AdamW, lr=1e-3)
    x = torch.randn(8, 16)

    def closure():
        optimizer.zero_grad()
        (model(x) - x[:, :1]).square().mean().backward()

    closure()
    optimizer.step(closure)
    _, resumed = make(SAM, torch.optim.AdamW)
    resumed.load_state_dict(optimizer.state_dict())
    moment = resumed.base_optimizer.state[resumed.param_groups[0]["params"][0]]["exp_avg"]
    assert torch.equal(moment, optimizer.state[model[0].weight]["exp_avg"])


@pytest.fixture
def stock():
    """The methods of torch's class, put back when the test ends."""
    torch_patches.restore()
    kind: Any = torch.optim.Optimizer
    before = kind.state_dict, kind.load_state_dict
    yield kind
    torch_patches.restore()
    kind.state_dict, kind.load_state_dict = before


def test_methods_that_something_else_has_replaced_are_called_and_stay(stock):
    parameters = [*torch_bf16.cast_model(nn.Linear(4, 4)).parameters()]
    called, load = [], stock.load_state_dict

    def earlier(self, state_dict):
        called.append(type(self).__name__)
        return load(self, state_dict)

    stock.load_state_dict = earlier
    torch_bf16.AdamW(parameters)
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    sgd.load_state_dict(sgd.state_dict())
    assert called == ["SGD"]
    stock.state_dict = lambda self: {"mine": 1}
    torch_patches.restore()
    assert stock.load_state_dict is earlier
    assert sgd.state_dict() == {"mine": 1}


def test_a_recipe_that_a_wrapper_writes_into_the_groups_is_refused_with_the_way_out():
    parameters = [*torch_bf16.cast_model(nn.Linear(4, 4)).parameters()]
    with pytest.raises(ValueError, match=r"SAM.*functools.partial\(torch_bf16.AdamW, recipe="):
        SAM(parameters, torch_bf16.AdamW, lr=1e-3, recipe="bf16-stochastic")
