"""Weights that something else has written are noticed, after any number of steps of any kind."""

import copy

import pytest
import torch
from foreign_cases import OWN
from optimizer_cases import make_optimizer, take_steps
from torch import nn

from torch_bf16 import SGD, cast_model, convert, get_recipe
from torch_bf16.engine.versions import Snapshot, Versions
from torch_bf16.sharding import shard_of

BF16 = torch.bfloat16


def separate():
    return [nn.Parameter(torch.full((8, 64), float(n + 1)).to(BF16)) for n in range(3)]


def views_of_one_buffer():
    """All of them count writes together."""
    flat = torch.cat([each.detach().reshape(-1) for each in separate()])
    return [nn.Parameter(each.view(8, 64)) for each in flat.chunk(3)]


def strided():
    return [nn.Parameter(each.detach().t()) for each in separate()]


def remainders(optimizer, parameters):
    return [optimizer.state[each]["remainder16"].clone() for each in parameters]


TURNS = [(0, 1, 2), (0,), (1, 2), (0, 1, 2), (2,), (), (0, 2)]


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("turns", [TURNS, TURNS[1:]], ids=["all first", "one first"])
def test_masters_last_while_other_views_of_the_same_tensor_take_steps(turns, backend):
    made = views_of_one_buffer(), separate()
    optimizers = [make_optimizer("adamw", "master", backend, p) for p in made]
    gradients = [torch.randn_like(each) for each in made[0]]
    for numbers in turns:
        for parameters, optimizer in zip(made, optimizers, strict=True):
            for number, (each, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                each.grad = gradient.clone() if number in numbers else None
            optimizer.step()
    kept = [remainders(*reversed(each)) for each in zip(made, optimizers, strict=True)]
    assert all(each.any() for each in kept[0])
    assert all(map(torch.equal, *kept))


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("make", [separate, views_of_one_buffer, strided])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_masters_last_until_a_weight_is_written(make, backend, steps):
    parameters, alike = make(), separate()
    if make is strided:
        alike = [nn.Parameter(each.detach().t().contiguous()) for each in alike]
    optimizers = [make_optimizer("adamw", "master", backend, p) for p in (parameters, alike)]
    gradients = [torch.randn_like(each) for each in alike]
    for mine, optimizer in zip((parameters, alike), optimizers, strict=True):
        for each, gradient in zip(mine, gradients, strict=True):
            each.grad = gradient.clone()
        for _ in range(steps):
            optimizer.step()
    kept = remainders(optimizers[0], parameters)
    assert any(each.any() for each in kept)
    assert all(map(torch.equal, kept, remainders(optimizers[1], alike)))
    with torch.no_grad():
        parameters[1].fill_(1.0)
    optimizers[0].param_groups[0]["lr"] = 0.0
    optimizers[0].step()
    assert torch.equal(optimizers[0].exact_weight(parameters[1]), torch.ones_like(alike[1]).float())


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_saved_state_knows_of_a_write_after_any_number_of_steps(steps):
    parameters = separate()
    optimizer = make_optimizer("adamw", "master", "cpu", parameters)
    take_steps(optimizer, [*range(steps)])
    exact = [optimizer.exact_weight(each) for each in parameters]
    assert not torch.equal(exact[0], parameters[0].detach().float())
    with torch.no_grad():
        parameters[0].add_(0)
    assert torch.equal(optimizer.exact_weight(parameters[0]), parameters[0].detach().float())
    assert torch.equal(optimizer.exact_weight(parameters[1]), exact[1])


def test_a_step_of_some_ends_what_is_known_of_all():
    parameters = separate()
    optimizer = make_optimizer("adamw", "master", "cpu", parameters)
    take_steps(optimizer, [0, 1, 2])
    last, parameters[2].grad = parameters[2].grad, None
    optimizer.step()
    with torch.no_grad():
        parameters[2].fill_(1.0)
    parameters[2].grad = last
    optimizer.param_groups[0]["lr"] = 0.0
    exact = [optimizer.exact_weight(each) for each in parameters[:2]]
    optimizer.step()
    assert torch.equal(optimizer.exact_weight(parameters[2]), torch.ones(8, 64))
    assert all(map(torch.equal, exact, map(optimizer.exact_weight, parameters[:2])))


def test_what_is_put_back_between_steps_is_no_write_of_others():
    parameters = separate()
    optimizer = make_optimizer("adamw", "master", "cpu", parameters)
    take_steps(optimizer, [0, 1])
    parameters[0].data.mul_(1.5)
    with pytest.warns(UserWarning, match=r"written through p\.data"):
        optimizer.step()
    optimizer.set_exact_weight(parameters[1], optimizer.exact_weight(parameters[1]) * 1.001)
    for _ in range(3):
        optimizer.step()
        exact = [optimizer.exact_weight(each) for each in parameters]
        assert not any(map(torch.equal, exact, (each.detach().float() for each in parameters)))


@pytest.mark.parametrize("between", ["idle", "skipped"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.ASGD])
def test_what_is_put_back_around_a_step_without_it_keeps_its_master(kind, between):
    """An evaluation copies an average into a weight, and the weight back, in a GAN's other turn."""
    parameters = separate()
    optimizer = convert(kind(parameters, lr=1e-3), "bf16-fp32-master")
    take_steps(optimizer, range(2))
    before = optimizer.exact_weight(parameters[0])
    for _ in range(3):
        weight = parameters[0].detach().clone()
        with torch.no_grad():
            parameters[0].copy_(weight * 2)
            parameters[0].copy_(weight)
        for each in parameters:
            each.grad = torch.ones_like(each)
        if between == "idle":
            parameters[0].grad = None
        else:
            optimizer.skip_next_step_where(torch.ones(()))
        optimizer.step()
        assert torch.equal(optimizer.exact_weight(parameters[0]), before)


def test_versions_are_summed_where_steps_raise_them_alike():
    parameters = separate()
    snapshots = [Snapshot.of(shard_of(each)) for each in parameters]
    versions = Versions(parameters, snapshots, unseen=True)
    asked = []
    versions._parameters.versions = lambda: asked.append(1) or [p._version for p in parameters]
    for _ in range(4):
        assert versions.changed() == []
        versions.note_step([0, 1, 2], parameters)
    # The first look, and before and after the first step.
    assert len(asked) == 3
    assert [each.version for each in snapshots] == [each._version for each in parameters]
    with torch.no_grad():
        parameters[1].zero_()
    assert versions.changed() == [1]
    versions.note([1])
    assert versions.changed() == []
    assert [each.version for each in snapshots] == [each._version for each in parameters]


def take_turns(optimizers, parameters):
    for optimizer in optimizers * 3:
        for each in parameters:
            each.grad = torch.ones_like(each)
        optimizer.step()


KINDS = {"adamw": lambda p: torch.optim.AdamW(p, lr=0.01), "own step": OWN["adamax"]}


@pytest.mark.parametrize("name", KINDS)
def test_a_second_optimizer_with_masters_of_the_same_weights_is_named(name):
    parameters = separate()
    optimizers = [
        convert(KINDS[name]([*some]), "bf16-fp32-master") for some in (parameters, parameters[:2])
    ]
    with pytest.warns(UserWarning, match="another optimizer has stepped") as found:
        take_turns(optimizers, parameters)
    assert len(found) == 2
    assert "has stepped 2 of the parameters of this" in str(found[0].message)
    assert "of shape (8, 64)" in str(found[0].message)


@pytest.mark.parametrize("reads", [False, True], ids=["p.data read later", "from the start"])
def test_who_is_told_of_a_second_master_is_not_told_that_weights_are_blended(reads):
    p = nn.Parameter(torch.linspace(-1, 1, 64).bfloat16())
    both = [SGD([p], lr=0.05, recipe="bf16-fp32-master") for _ in range(2)]
    p.grad = torch.full_like(p, -1.0)
    for optimizer in both:
        optimizer.step()
    for optimizer in both:
        if reads:
            _ = p.data  # from which on its numbers are compared
        with pytest.warns(UserWarning, match="another optimizer has stepped"):
            optimizer.step()
    for optimizer in both * 8:
        _ = p.data
        optimizer.step()


def test_optimizers_of_other_weights_or_one_that_stopped_are_not():
    parameters = separate()
    last, other, now = (
        make_optimizer("adamw", "master", "eager", some)
        for some in (parameters, separate(), parameters)
    )
    for optimizer in (last, last, *(other, now) * 3):
        take_steps(optimizer, [0])
        with torch.no_grad():
            parameters[0].clamp_(-1, 1)


def test_weights_in_fp32_lose_nothing_to_a_second_optimizer():
    models = [torch.nn.Linear(8, 8), None]
    models[1] = copy.deepcopy(models[0])
    recipe = get_recipe("bf16-fp32-master", keep_fp32=("*",))
    cast_model(models[1], recipe)
    for model in models:
        optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for _ in range(2)]
        if model is models[1]:
            optimizers = [convert(each, recipe, model=model) for each in optimizers]
        take_turns(optimizers, [*model.parameters()])
    assert all(map(torch.equal, *(each.parameters() for each in models)))
