"""Names that a model has given last while parameters leave the groups, come, or change places."""

import copy
import weakref

import pytest
import torch
from exported import export_file
from optimizer_cases import take_steps
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.utils import prune

import torch_bf16

STOCHASTIC = "bf16-stochastic"
ALL = [[0, 1, 2, 3, 4, 5]]


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
    group = optimizer.param_groups[0]["params"]
    noise = optimizer._engine.names.keys(optimizer.param_groups)[id(group[1])]
    optimizer.param_groups[0]["params"].reverse()
    take_steps(optimizer, [1])
    assert names(optimizer) == [["2.weight", "1.weight"]]
    keys = optimizer._engine.names.keys(optimizer.param_groups)
    assert keys[id(group[0])] == noise == "2.weight"


@pytest.mark.parametrize("accumulate", ["bf16_nearest", "bf16_stochastic"])
def test_weights_with_one_name_draw_different_noise(accumulate):
    """As twin critics of reinforcement learning, named by their modules in one optimizer."""
    twins = [nn.Parameter(torch.ones(64, 64).bfloat16()) for _ in range(3)]
    recipe = torch_bf16.get_recipe(STOCHASTIC, accumulate=accumulate)
    optimizer = torch_bf16.SGD([("weight", each) for each in twins], lr=0.001, recipe=recipe)
    alone = nn.Parameter(twins[0].detach().clone())
    single = torch_bf16.SGD([("weight", alone)], lr=0.001, recipe=recipe)
    for each in (*twins, alone):
        for scale in (1.0, 0.001):
            (each.sum() * scale).backward()
    gradients = [each.grad for each in twins]
    assert torch.equal(twins[0].grad, alone.grad)
    optimizer.step()
    single.step()
    assert torch.equal(twins[0], alone)
    pairs = [(0, 1), (0, 2), (1, 2)]
    assert not any(torch.equal(twins[one], twins[other]) for one, other in pairs)
    if accumulate == "bf16_stochastic":
        assert not any(torch.equal(gradients[one], gradients[other]) for one, other in pairs)
    for each in twins:
        optimizer.set_exact_weight(each, torch.full((64, 64), 1.001))
    assert not any(torch.equal(twins[one], twins[other]) for one, other in pairs)
    assert names(optimizer) == [["weight"] * 3]


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


def splats(rows):
    """Parameters of one group each, as in Gaussian splatting; nothing keeps the module."""
    torch.manual_seed(0)
    parameters = {each: nn.Parameter(torch.randn(rows, 4)) for each in ("colours", "means")}
    groups = [{"params": [each]} for each in parameters.values()]
    optimizer = torch.optim.Adam(groups, lr=1e-3)
    torch_bf16.prepare(nn.ParameterDict(parameters), optimizer, STOCHASTIC)
    return optimizer


def prune_rows(optimizer, rows):
    for group in optimizer.param_groups:
        (old,) = group["params"]
        state = optimizer.state.pop(old)
        state.update({key: state[key][:rows] for key in ("exp_avg", "exp_avg_sq")})
        group["params"][0] = nn.Parameter(old.detach()[:rows].clone())
        optimizer.state[group["params"][0]] = state


@pytest.mark.parametrize("steps", [0, 1])
def test_a_parameter_that_replaces_another_takes_its_name_and_noise(steps):
    optimizer = splats(16)
    take_steps(optimizer, [0])
    first = weakref.ref(optimizer.param_groups[0]["params"][0])
    prune_rows(optimizer, 12)
    take_steps(optimizer, range(1, 1 + steps))
    saved = copy.deepcopy(optimizer.state_dict())
    assert names(optimizer) == [["colours"], ["means"]]
    resumed = splats(12)
    ours, theirs = ([*map(only, each.param_groups)] for each in (optimizer, resumed))
    with torch.no_grad():
        for one, another in zip(ours, theirs, strict=True):
            another.copy_(one)
    resumed.load_state_dict(saved)
    for each in (optimizer, resumed):
        take_steps(each, [5, 6, 7])
    assert all(map(torch.equal, ours, theirs))
    assert first() is None


def only(group):
    (parameter,) = group["params"]
    return parameter


def grouped(groups, renamed="", renamed_layers=0):
    """Three layers whose parameters come in these groups, by number, under other names."""
    torch.manual_seed(0)
    model = torch_bf16.cast_model(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), STOCHASTIC)
    named = [
        (f"{renamed}{int(name[0]) + renamed_layers}{name[1:]}", parameter)
        for name, parameter in model.named_parameters()
    ]
    groups = [{"params": [named[number] for number in group]} for group in groups]
    return model, torch_bf16.AdamW(groups, lr=0.01, recipe=STOCHASTIC)


@pytest.mark.parametrize(
    ("groups", "flat"),
    [
        ([[0, 2, 4], [1, 3, 5]], True),
        ([[5, 3, 4], [0, 1, 2]], True),
        ([[5, 4, 3, 2, 1, 0]], True),
        ([[5, 4, 3, 2, 1, 0]], False),
    ],
)
def test_states_by_name_resume_in_other_groups(groups, flat):
    model, optimizer = grouped(ALL)
    take_steps(optimizer, range(2))
    other, resumed = grouped(groups)
    other.load_state_dict(model.state_dict())
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(other, resumed, saved, options=options)
    for step in range(2, 4):
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            one.grad = torch.randn_like(one) * step
            two.grad = one.grad.clone()
        optimizer.step()
        resumed.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_an_optimizer_without_names_gets_those_of_its_own_parameters():
    model, optimizer = grouped(ALL)
    take_steps(optimizer, [0])
    other, _ = grouped(ALL)
    in_reverse = [*reversed([*other.named_parameters()])]
    resumed = torch_bf16.AdamW([p for _, p in in_reverse], recipe=STOCHASTIC)
    set_optimizer_state_dict(other, resumed, get_optimizer_state_dict(model, optimizer))
    assert names(resumed) == [[name for name, _ in in_reverse]]


def test_groups_that_torch_gives_no_options_are_refused_by_name():
    model, optimizer = grouped(ALL)
    take_steps(optimizer, [0])
    other, resumed = grouped([[0, 2, 4], [1, 3, 5]])
    saved = get_optimizer_state_dict(model, optimizer)
    with pytest.raises(torch_bf16.StateMismatchError, match=r"'0\.weight'.*flatten_optimizer"):
        set_optimizer_state_dict(other, resumed, saved)


@pytest.mark.parametrize("flat", [True, False])
def test_names_that_the_model_has_for_other_parameters_are_not_mixed_up(flat):
    # As in a part of a model, whose layers count from 0, with the names of the whole model.
    (model, optimizer), (other, resumed) = (grouped(ALL, renamed_layers=1) for _ in range(2))
    take_steps(optimizer, [0])
    before, options = names(resumed), StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(other, resumed, saved, options=options)
    assert names(resumed) == before == names(optimizer)


@pytest.mark.parametrize(
    ("groups", "kept"),
    [(ALL, [[f"net.{n}.{kind}" for n in range(3) for kind in ("weight", "bias")]]), (None, None)],
)
def test_names_of_the_users_own_are_loaded_where_they_fit(groups, kept):
    model, optimizer = grouped(ALL, renamed="net.")
    take_steps(optimizer, [0])
    other, resumed = grouped(groups or [[0, 2, 4], [1, 3, 5]])
    before = names(resumed)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(other, resumed, saved, options=options)
    assert names(resumed) == (kept or before)


@pytest.mark.parametrize("recipe", [STOCHASTIC, "bf16-fp32-master"])
def test_a_resumed_run_whose_weights_were_renamed_is_told_of_its_noise(recipe, caplog):
    """``torch.nn.utils.prune`` renames a weight, and a run that goes on keeps its keys."""
    saved = copy.deepcopy(pruned(recipe, "afterwards")[1].state_dict())
    for when, told in (("afterwards", False), ("before", recipe == STOCHASTIC)):
        caplog.clear()
        pruned(recipe, when)[1].load_state_dict(saved)
        assert ("1 of 2 parameters had other names" in caplog.text) == told, when
    assert not told or "(0.weight, now 0.weight_orig)" in caplog.text


def pruned(recipe, when):
    """A run of a layer that is pruned before it is prepared, or afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if when == "before":
        prune.identity(model[0], "weight")
        # As a new optimizer would have them: pruning puts the weight last.
        optimizer = torch.optim.AdamW([model[0].weight_orig, model[1].weight], lr=1e-3)
    torch_bf16.prepare(model, optimizer, recipe)
    if when == "afterwards":
        prune.identity(model[0], "weight")
    take_steps(optimizer, [0])
    return model, optimizer
