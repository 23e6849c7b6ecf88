"""State dicts of optimizers that have not stepped: what a cast took from the weights is in them."""

import copy
import pickle

import pytest
import torch

import torch_bf16

KINDS = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adamax]
COPIES = [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))]


def start(kind, recipe, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5))
    weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    optimizer = kind(model.parameters(), lr=1e-3)
    torch_bf16.prepare(model, optimizer, recipe)
    return weights, model, optimizer


def step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    return torch_bf16.fp32_state_dict(model, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_masters_start_from_the_weights_of_before_the_cast(kind):
    weights, model, optimizer = start(kind, "bf16-fp32-master", 0)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    # Nothing of the optimizer has changed by being saved.
    assert not optimizer.state
    _, resumed, other = start(kind, "bf16-fp32-master", 1)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    found = torch_bf16.fp32_state_dict(resumed, other)
    assert all(torch.equal(found[name], each) for name, each in weights.items())
    ones, others = step(model, optimizer), step(resumed, other)
    assert all(torch.equal(each, others[name]) for name, each in ones.items())


@pytest.mark.parametrize("kind", KINDS)
def test_only_parameters_with_a_master_have_a_state_before_the_first_step(kind):
    _, _, optimizer = start(kind, "bf16-stochastic", 0)
    # The matrix has no master; the biases and the norm have.
    assert sorted(optimizer.state_dict()["state"]) == [1, 2, 3]
    plain = kind(torch.nn.Linear(3, 3).parameters())
    assert plain.state_dict()["state"] == {}
    assert torch_bf16.convert(plain).state_dict()["state"] == {}


def test_torchs_own_class_goes_on_from_such_a_state_dict():
    weights, _, optimizer = start(torch.optim.AdamW, "bf16-fp32-master", 0)
    fp32 = [torch.nn.Parameter(each.clone()) for each in weights.values()]
    plain = torch.optim.AdamW(fp32, lr=1e-3)
    plain.load_state_dict(torch_bf16.fp32_optimizer_state_dict(optimizer))
    for parameter in fp32:
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    for parameter, before in zip(fp32, weights.values(), strict=True):
        assert (parameter != before).all()


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_have_their_masters_alone_until_they_are_trained(kind):
    def frozen(seed):
        weights, model, optimizer = start(kind, "bf16-fp32-master", seed)
        model[0].requires_grad_(False)
        return weights, model, optimizer

    def train(model, optimizer):
        model(torch.ones(2, 6).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    weights, model, optimizer = frozen(0)
    train(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    _, resumed, other = frozen(1)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    for number, parameter in enumerate(resumed[0].parameters()):
        assert [*saved[1]["state"][number]] == [*other.state[parameter]] == ["remainder16"]
    for one, its in ((model, optimizer), (resumed, other)):
        train(one, its)
        found = torch_bf16.fp32_state_dict(one, its)
        assert torch.equal(found["0.weight"], weights["0.weight"])
        one.requires_grad_(True)
        train(one, its)
    ones, others = step(model, optimizer), step(resumed, other)
    assert all(torch.equal(each, others[name]) for name, each in ones.items())


@pytest.mark.parametrize("again", COPIES, ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", [*KINDS, torch.optim.NAdam])
def test_a_loaded_optimizer_with_frozen_weights_is_copied(kind, again):
    weights, model, optimizer = start(kind, "bf16-fp32-master", 0)
    model[0].requires_grad_(False)
    optimizer.load_state_dict(optimizer.state_dict())
    # These states have no step count, which torch's own classes look for in copies.
    assert [*optimizer.state[model[0].weight]] == ["remainder16"]
    twin, its = again((model, optimizer))
    found = torch_bf16.fp32_state_dict(twin, its)
    assert all(torch.equal(found[name], each) for name, each in weights.items())
    ones, others = step(model, optimizer), step(twin, its)
    assert all(torch.equal(each, others[name]) for name, each in ones.items())
