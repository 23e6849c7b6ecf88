"""A state dict that something has damaged is refused by a message, and changes nothing."""

import copy

import pytest
import torch
from torch import nn

import torch_bf16


def make():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(4, 4).bfloat16())
    optimizer = torch_bf16.AdamW([p], lr=1e-3)
    p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def at(*keys, value):
    def damage(saved):
        for key in keys[:-1]:
            saved = saved[key]
        saved[keys[-1]] = value

    return damage


DAMAGED = {
    "a state is a number": (at("state", 0, value=3), "state of parameter 0 .* is int and must be"),
    "a state is a tensor": (at("state", 0, value=torch.ones(3)), "is Tensor and must be a dict"),
    "a group is None": (at("param_groups", 0, value=None), "group 0 .* list 'params' .*has None"),
    "a group has no list": (at("param_groups", 0, "params", value="x"), "'params' .*has 'x'"),
    "parameters are lists": (at("param_groups", 0, "params", value=[[0]]), r"has \[\[0\]\]"),
    "the step is a word": (at("state", 0, "step", value="a"), "is 'a' and must be a number of"),
    "a moment is sparse": (
        at("state", 0, "exp_avg", value=torch.ones(4, 4).to_sparse()),
        "exp_avg of .* is torch.sparse_coo on cpu .*must be a dense tensor with memory",
    ),
    "a moment has no memory": (
        at("state", 0, "exp_avg", value=torch.ones(4, 4, device="meta")),
        "exp_avg of .* is torch.strided on meta .*must be a dense tensor with memory",
    ),
    "our entry is a word": (at("torch_bf16", value="x"), "'x'"),
    "the schema is a word": (at("torch_bf16", "schema", value="1"), "'schema': '1'"),
    "the recipe is None": (at("torch_bf16", "recipe", value=None), "its recipe is None and must"),
    "the seed is a word": (at("torch_bf16", "recipe", "seed", value="x"), "its seed is 'x' and"),
    "the last norm is a word": (at("torch_bf16", "last_norm", value="x"), "last_norm is 'x' and"),
    "the last norm is a list": (at("torch_bf16", "last_norm", value=[1.0]), r"is \[1.0\] and must"),
    "names are a number": (at("torch_bf16", "names", value=3), "names are not lists of names"),
    "a name is a number": (at("torch_bf16", "names", value=[[3]]), "names are not lists of names"),
}


@pytest.mark.parametrize("what", DAMAGED)
@pytest.mark.parametrize("how", ["load_state_dict", "check_state_dict"])
def test_it_is_refused_and_nothing_changes(what, how):
    damage, match = DAMAGED[what]
    optimizer = make()
    saved = copy.deepcopy(optimizer.state_dict())
    damage(saved)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(torch_bf16.StateMismatchError, match=f"{match}.*. No state was changed$"):
        getattr(optimizer, how)(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, value in before["state"][0].items():
        assert torch.equal(after["state"][0][key], value)


CLASSES = [
    each
    for each in vars(torch_bf16).values()
    if isinstance(each, type)
    and issubclass(each, torch_bf16.BF16Optimizer)
    and each is not torch_bf16.BF16Optimizer
]


def stepped(make):
    p = nn.Parameter(torch.ones(4, 4).bfloat16())
    optimizer = make([("w", p)], lr=0.01, backend="eager")
    p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("make", CLASSES, ids=lambda each: each.__name__)
def test_what_a_group_lacks_is_refused_or_the_next_step_does_without(make):
    saved = stepped(make).state_dict()
    for name in saved["param_groups"][0].keys() - {"params", "param_names"}:
        lacking = copy.deepcopy(saved)
        del lacking["param_groups"][0][name]
        optimizer = stepped(make)
        try:
            optimizer.load_state_dict(lacking)
        except torch_bf16.StateMismatchError as error:
            assert f"has no {name}: it was saved from another class" in str(error)  # noqa: PT017
        else:
            optimizer.step()


def test_what_a_user_or_a_scheduler_adds_to_a_group_may_be_missing():
    optimizer = make()
    saved = optimizer.state_dict()
    optimizer.param_groups[0].update(initial_lr=1e-3, lr_scale=0.5)
    optimizer.load_state_dict(saved)
    optimizer.step()
