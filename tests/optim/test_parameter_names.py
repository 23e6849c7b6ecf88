"""Names that a model has given last while parameters leave the groups, come, or change places."""

import copy

import pytest
import torch
from exported import export_file
from optimizer_cases import take_steps
from torch import nn

import torch_bf16


@pytest.fixture
def trained():
    """A model of three layers of which the last two are trained, and have taken a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([*model[1:].parameters()], lr=1e-5)
    torch_bf16.prepare(model, optimizer, "bf16-fp32-master")
    take_steps(optimizer, [0])
    return model, optimizer


def names(optimizer):
    return optimizer.state_dict()["torch_bf16"]["names"]


def exported(model, optimizer, folder):
    file = folder / "checkpoint.pt"
    torch_bf16.save_checkpoint(file, model=model, optimizer=optimizer)
    export_file(file, folder / "weights.pt")
    return torch.load(folder / "weights.pt")


@pytest.mark.parametrize("steps", [0, 1])
def test_a_parameter_leaves_its_group(trained, steps, tmp_path):
    model, optimizer = trained
    out, kept = optimizer.param_groups[0]["params"]
    del optimizer.state[out]
    optimizer.param_groups[0]["params"] = [kept]
    take_steps(optimizer, range(steps))
    left = optimizer.exact_weight(kept)
    assert names(optimizer) == [["2.weight"]]
    assert torch.equal(exported(model, optimizer, tmp_path)["2.weight"], left)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_parameter_is_added(trained, steps, tmp_path):
    model, optimizer = trained
    first = model[0].weight.requires_grad_(True)
    optimizer.add_param_group({"params": [first]})
    take_steps(optimizer, range(steps))
    assert names(optimizer) == [["1.weight", "2.weight"], ["0.weight"]]
    if steps:
        weights = exported(model, optimizer, tmp_path)
        assert torch.equal(weights["0.weight"], optimizer.exact_weight(first))


def test_parameters_change_places(trained):
    _, optimizer = trained
    noise = optimizer._engine.names.key(optimizer.param_groups, 0, 1)
    optimizer.param_groups[0]["params"].reverse()
    take_steps(optimizer, [1])
    assert names(optimizer) == [["2.weight", "1.weight"]]
    assert optimizer._engine.names.key(optimizer.param_groups, 0, 0) == noise == "2.weight"


def test_a_copy_has_the_names_of_its_own_parameters(trained):
    model, optimizer = trained
    _, other = copy.deepcopy((model, optimizer))
    del other.state[other.param_groups[0]["params"].pop(0)]
    take_steps(other, [1])
    assert names(other) == [["2.weight"]]
    assert names(optimizer) == [["1.weight", "2.weight"]]


def test_a_parameter_that_has_left_can_be_freed(trained):
    _, optimizer = trained
    del optimizer.state[optimizer.param_groups[0]["params"].pop(0)]
    take_steps(optimizer, [1])
    assert len(optimizer._engine.names.given) == 1
