"""Schedule-free optimizers that follow a model, and contexts of averaged weights."""

import copy
import pickle

import pytest
import torch
from optimizer_cases import set_gradients
from torch import nn

import torch_bf16


def modelled():
    torch.manual_seed(0)
    model = torch_bf16.cast_model(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    optimizer = torch_bf16.AdamWScheduleFree(model.named_parameters(), lr=0.1, backend="eager")
    for seed in range(3):
        set_gradients(model.parameters(), seed)
        optimizer.step()
    return model, optimizer


def test_an_optimizer_follows_the_modes_of_its_model_and_no_copy_s():
    model, optimizer = modelled()
    trained = [p.detach().clone() for p in model.parameters()]
    torch_bf16.follow(model, optimizer, torch.optim.SGD(nn.Linear(1, 1).parameters()))
    wrapper = nn.ModuleDict({"inside": model}).eval()
    assert not any(map(torch.equal, model.parameters(), trained))
    model[0].train()
    assert optimizer.param_groups[0]["train_mode"] is False
    wrapper.train()
    assert model.training
    assert all(map(torch.equal, model.parameters(), trained))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.eval() is other
        assert not other.training
    assert optimizer.param_groups[0]["train_mode"] is True


def test_a_model_s_own_train_is_still_called():
    model, optimizer = modelled()
    called = []

    def train(mode=True):
        called.append(mode)
        return type(model).train(model, mode)

    model.train = train
    torch_bf16.follow(model, optimizer)
    assert model.eval() is model
    assert not optimizer.param_groups[0]["train_mode"]
    model.train()
    assert called == [False, True]


class Frozen(nn.Sequential):
    def stay(self, mode=True):
        self.asked = mode
        return self


def test_an_own_train_that_leaves_the_model_as_it_was_leaves_the_weights_too():
    model = torch_bf16.cast_model(Frozen(nn.Linear(4, 4)))
    optimizer = torch_bf16.AdamWScheduleFree(model.named_parameters(), lr=0.1)
    model.eval()
    model.train = model.stay
    torch_bf16.follow(model, optimizer)
    model.train()
    assert model.asked is True
    assert not optimizer.param_groups[0]["train_mode"]
    twin = copy.deepcopy(model)
    twin.train(False)
    assert (twin.asked, model.asked) == (False, True)


def test_within_averaged_weights_are_the_average_and_after_it_what_they_were():
    model, optimizer = modelled()
    trained = [p.detach().clone() for p in model.parameters()]
    torch_bf16.follow(model, optimizer)
    other = torch.optim.SGD([{"params": nn.Linear(1, 1).parameters(), "train_mode": True}])
    with torch_bf16.averaged(nn.ModuleList([model]), "no optimizer", other) as switched:
        assert switched == [optimizer]
        assert not any(map(torch.equal, model.parameters(), trained))
        with torch_bf16.averaged(optimizer) as inner:
            assert inner == []
        saved = torch_bf16.fp32_state_dict(model, optimizer)
    assert all(map(torch.equal, model.parameters(), trained))
    optimizer.eval()
    exact = [optimizer.exact_weight(p) for p in model.parameters()]
    assert all(map(torch.equal, saved.values(), exact))


def test_one_optimizer_that_cannot_go_back_leaves_no_other_in_eval_mode(monkeypatch):
    optimizers = [modelled()[1] for _ in range(3)]
    train = optimizers[1].train

    def refuse(mode=True):
        if mode:
            raise ValueError("not now")
        train(mode)

    monkeypatch.setattr(optimizers[1], "train", refuse)
    with pytest.raises(ValueError, match="not now"), torch_bf16.averaged(*optimizers):
        assert not any(each.param_groups[0]["train_mode"] for each in optimizers)
    assert [each.param_groups[0]["train_mode"] for each in optimizers] == [True, False, True]
