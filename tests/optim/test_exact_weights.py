"""Averaging and blending of weights in fp32, whatever they are stored in."""

import copy
import pickle

import pytest
import torch
from torch import nn

import torch_bf16

BF16 = torch.bfloat16
RECIPES = ["bf16-fp32-master", "bf16-stochastic", torch_bf16.Recipe("9", weights="bf16+8")]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=["14", "8", "9"])


def make(recipe, seed=0, make_optimizer=torch_bf16.AdamW, steps=2, lr=1e-5):
    torch.manual_seed(seed)
    model = torch_bf16.cast_model(nn.Linear(64, 64), recipe)
    optimizer = make_optimizer(model.parameters(), lr=lr, recipe=recipe)
    for _ in range(steps):
        take_step(model, optimizer)
    return model, optimizer


def take_step(model, optimizer):
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()


def foreign(parameters, lr, recipe):
    return torch_bf16.convert(torch.optim.Adamax(parameters, lr=lr), recipe)


@every_recipe
def test_autograd_notices_that_weights_were_written(recipe):
    model, optimizer = make(recipe)
    loss = model.weight.square().sum()
    optimizer.set_exact_weight(model.weight, torch.zeros(64, 64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# At 9 bytes the first step rounds what the cast remembers, 32 bits, to 24.
@pytest.mark.parametrize(
    ("recipe", "steps"),
    [*((each, 2) for each in RECIPES), *((each, 0) for each in RECIPES[:2])],
    ids=["14-2", "8-2", "9-2", "14-0", "8-0"],
)
@pytest.mark.parametrize("kind", [torch_bf16.AdamW, torch_bf16.SGD, foreign])
def test_what_is_put_back_unchanged_changes_no_bit(recipe, steps, kind):
    model, optimizer = make(recipe, make_optimizer=kind, steps=steps)
    stock_model, stock = copy.deepcopy((model, optimizer)) if steps else make(
        recipe, make_optimizer=kind, steps=0)  # fmt: skip
    before = [optimizer.exact_weight(p).clone() for p in model.parameters()]
    with torch_bf16.exact_weights(model, optimizer) as weights:
        assert list(weights) == ["weight", "bias"]
        assert all(each.dtype == torch.float32 for each in weights.values())
    for p, want in zip(model.parameters(), before, strict=True):
        assert torch.equal(optimizer.exact_weight(p), want)
    for each, its in ((model, optimizer), (stock_model, stock)):
        torch.manual_seed(5)
        take_step(each, its)
    for p, other in zip(model.parameters(), stock_model.parameters(), strict=True):
        assert torch.equal(p, other)
        assert torch.equal(optimizer.exact_weight(p), stock.exact_weight(other))


@every_recipe
@pytest.mark.filterwarnings("ignore:.*written through p.data")
@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_does_not_blend_a_written_weight_with_old_low_bits(recipe, again):
    model, optimizer = make(recipe, lr=1e-2)
    with torch.no_grad():
        model.weight.mul_(1.5)
    model.bias.data.mul_(1.5)
    twin_model, twin = again((model, optimizer))
    for p, other in zip(model.parameters(), twin_model.parameters(), strict=True):
        assert torch.equal(optimizer.exact_weight(p), twin.exact_weight(other))
    for each, its in ((model, optimizer), (twin_model, twin)):
        torch.manual_seed(5)
        take_step(each, its)
    for p, other in zip(model.parameters(), twin_model.parameters(), strict=True):
        assert torch.equal(optimizer.exact_weight(p), twin.exact_weight(other))


def in_place(weights):
    for each in weights.values():
        each.mul_(1 + 2**-14)


def by_data(weights):
    for each in weights.values():
        each.data = each.data * (1 + 2**-14)


def by_key(weights):
    for name in weights:
        weights[name] = weights[name] * (1 + 2**-14)


def by_vector(weights):
    vector = nn.utils.parameters_to_vector(weights.values())
    nn.utils.vector_to_parameters(vector * (1 + 2**-14), weights.values())


def by_an_optimizer(weights):
    for each in weights.values():
        each.grad = -each.clone()
    torch.optim.SGD(weights.values(), lr=2**-14).step()


@pytest.mark.parametrize("blend", [in_place, by_data, by_key, by_vector, by_an_optimizer])
def test_a_move_below_a_bf16_unit_is_kept_exactly_by_masters(blend):
    model, optimizer = make("bf16-fp32-master")
    before = [optimizer.exact_weight(p) for p in model.parameters()]
    with torch_bf16.exact_weights(model, optimizer) as weights:
        blend(weights)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(optimizer.exact_weight(p), old * (1 + 2**-14))
    take_step(model, optimizer)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.allclose(optimizer.exact_weight(p), old, atol=2e-4)


def test_a_move_below_a_bf16_unit_is_kept_in_the_mean_without_masters():
    model, optimizer = make("bf16-stochastic")
    before = model.weight.detach().float()
    for _ in range(64):
        with torch_bf16.exact_weights(model, optimizer) as weights:
            weights["weight"].add_(2**-13 * before.sign())
    moved = (model.weight.detach().float() - before) * before.sign()
    assert moved.mean().item() == pytest.approx(64 * 2**-13, rel=0.05)
    rounded = before.to(BF16)
    for _ in range(64):
        rounded += (2**-13 * before.sign()).to(BF16)
    control = (rounded.float() - before) * before.sign()
    assert control.mean().item() != pytest.approx(64 * 2**-13, rel=0.05)


@every_recipe
def test_replicas_that_put_the_same_numbers_back_have_the_same_bits(recipe):
    (one, first), (other, second) = make(recipe), make(recipe, seed=1)
    for _ in range(2):
        with (
            torch_bf16.exact_weights(one, first) as mine,
            torch_bf16.exact_weights(other, second) as theirs,
        ):
            for name in mine:
                mine[name] = theirs[name] = (mine[name] + theirs[name]) / 2
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)
            assert torch.equal(first.exact_weight(p), second.exact_weight(q))
        take_step(one, first)
        take_step(other, second)


@every_recipe
def test_what_was_put_there_before_the_first_step_is_what_it_starts_from(recipe):
    model, optimizer = make(recipe, steps=0)
    value = torch.linspace(1, 2, 64)
    optimizer.set_exact_weight(model.bias, value)
    assert torch.allclose(optimizer.exact_weight(model.bias), value, atol=2**-15)
    saved = copy.deepcopy(optimizer.state_dict())
    other, loaded = make(recipe, seed=1, steps=0)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(saved)
    assert torch.equal(loaded.exact_weight(other.bias), optimizer.exact_weight(model.bias))
    optimizer.param_groups[0].update(lr=0.0)
    take_step(model, optimizer)
    assert torch.allclose(optimizer.exact_weight(model.bias), value, atol=2**-15)


def partly_frozen():
    """A module of which the optimizer lacks the frozen bias, whose cast has dropped bits."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    model.bias.requires_grad_(False)
    exact = model.bias.detach().clone()
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    torch_bf16.prepare(model, optimizer, "bf16-fp32-master")
    return model, optimizer, exact


def test_parameters_that_no_optimizer_has_are_copied_and_written_back_if_they_changed():
    model, optimizer, exact = partly_frozen()
    model.extra = nn.Parameter(torch.ones(3))
    version = model.bias._version
    with torch_bf16.exact_weights(model, optimizer) as weights:
        assert torch.equal(weights["bias"], exact)
        weights["extra"].mul_(2)
        assert torch.equal(model.extra, torch.ones(3))
    assert torch.equal(model.extra, torch.full((3,), 2.0))
    assert model.bias._version == version
    with torch_bf16.exact_weights(model, optimizer) as weights:
        assert torch.equal(weights["bias"], exact)
        weights["bias"] = exact * 3
        weights["extra"] = torch.zeros(3)
    assert torch.equal(model.extra, torch.zeros(3))
    assert torch.equal(torch_bf16.fp32_state_dict(model, optimizer)["bias"], exact * 3)


def test_a_context_within_another_of_the_same_weights_is_refused():
    model, optimizer, _ = partly_frozen()
    for inner in (model, nn.Sequential(model)):
        with torch_bf16.exact_weights(model, optimizer) as weights:
            weights["weight"].zero_()
            with pytest.raises(ValueError, match="would write its older copies over them"):
                torch_bf16.exact_weights(inner, optimizer).__enter__()
        assert not model.weight.any()


@pytest.mark.parametrize("error", [KeyError, ValueError], ids=["program's", "ours"])
def test_an_exception_puts_nothing_back(error):
    model, optimizer, _ = partly_frozen()
    before = [optimizer.exact_weight(p) for p in model.parameters()]

    def fail():
        with torch_bf16.exact_weights(model, optimizer) as weights:
            for each in weights.values():
                each.zero_()
            if error is KeyError:
                raise KeyError("stop")
            weights["stop"] = torch.zeros(1)

    with pytest.raises(error, match="stop"):
        fail()
    assert all(map(torch.equal, map(optimizer.exact_weight, model.parameters()), before))


def test_what_cannot_be_put_back_is_refused():
    model, optimizer = make("bf16-fp32-master")
    before = optimizer.exact_weight(model.weight)
    with pytest.raises(ValueError, match=r"float32 of shape .4.* for parameter .*takes float32 of"):
        optimizer.set_exact_weight(model.weight, torch.ones(4))
    with pytest.raises(ValueError, match=r"bfloat16 of shape .64, 64."):
        optimizer.set_exact_weight(model.weight, before.to(BF16))
    with pytest.raises(ValueError, match="that is in no group of this AdamW"):
        optimizer.set_exact_weight(nn.Parameter(torch.ones(4)), torch.ones(4))
    assert torch.equal(optimizer.exact_weight(model.weight), before)
    plain = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=r"exact_weights was given an SGD, .*by a recipe"):
        torch_bf16.exact_weights(model, plain).__enter__()


@pytest.mark.parametrize(
    "edit",
    [
        lambda w: w.update(other=w["bias"]),
        lambda w: w.pop("weight"),
        lambda w: w.update({1: w["bias"], "other": w["bias"]}),
    ],
)
def test_names_that_the_model_does_not_have_and_names_that_are_gone_are_refused(edit):
    model, optimizer = make("bf16-fp32-master")
    before = [p.detach().clone() for p in model.parameters()]

    def rename():
        with torch_bf16.exact_weights(model, optimizer) as weights:
            for weight in weights.values():
                weight *= 2
            edit(weights)

    with pytest.raises(
        ValueError, match=r"not those of the Linear, or lacks some: (other|weight|1, other)"
    ):
        rename()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("name", ["bias", "extra"])
def test_one_value_that_does_not_fit_leaves_all_weights_as_they_were(name):
    model, optimizer = make("bf16-fp32-master")
    model.extra = nn.Parameter(torch.ones(3))
    before = [p.detach().clone() for p in model.parameters()]

    def put_back():
        with torch_bf16.exact_weights(model, optimizer) as weights:
            for each in weights:
                weights[each] = 2 * weights[each]
            weights[name] = weights[name][:2]

    with pytest.raises(ValueError, match=r"shape \(2,\) for .*Nothing was changed"):
        put_back()
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_value_that_is_no_tensor_is_refused(frozen):
    model, optimizer = make("bf16-fp32-master")
    if frozen:
        model.extra = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    name = "extra" if frozen else "bias"
    with (
        pytest.raises(ValueError, match=r"was given None for .* Nothing was changed"),
        torch_bf16.exact_weights(model, optimizer) as weights,
    ):
        weights[name] = None


@pytest.mark.parametrize("reverse", [False, True])
def test_frozen_weights_beside_an_optimizer_of_another_recipe_are_exact(reverse):
    trained, frozen = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    frozen[1].requires_grad_(False)
    before = frozen[1].weight.clone()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (trained, frozen[0])]
    torch_bf16.prepare(trained, optimizers[0], "bf16-stochastic")
    torch_bf16.prepare(frozen, optimizers[1], "bf16-fp32-master")
    model = nn.ModuleList([trained, frozen])
    given = optimizers[::-1] if reverse else optimizers
    assert torch.equal(torch_bf16.fp32_state_dict(model, *given)["1.1.weight"], before)
    with torch_bf16.exact_weights(model, *given) as weights:
        weights["1.1.weight"] += 1e-5
    after = torch_bf16.fp32_state_dict(model, *given)["1.1.weight"]
    torch.testing.assert_close(after, before + 1e-5, rtol=0.0, atol=1e-7)


def test_averaging_every_eight_steps_moves_as_far_as_in_fp32():
    """Local SGD of two replicas at 1e-5: by ``p.data`` 60 % of the movement were lost."""

    def run(recipe, average):
        models = [nn.Linear(64, 64) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        start = models[0].weight.detach().clone()
        optimizers = []
        for each in models:
            if recipe is None:
                optimizers.append(torch.optim.SGD(each.parameters(), lr=1e-5))
            else:
                torch_bf16.cast_model(each, recipe)
                optimizers.append(torch_bf16.SGD(each.parameters(), lr=1e-5, recipe=recipe))
        for step in range(1, 65):
            for n, (each, its) in enumerate(zip(models, optimizers, strict=True)):
                for p in each.parameters():
                    p.grad = torch.full_like(p, 1.0 + 0.5 * n)
                its.step()
            if step % 8 == 0:
                average(models, optimizers)
        return (start - models[0].weight.detach().float()).mean().item()

    def exactly(models, optimizers):
        with (
            torch_bf16.exact_weights(models[0], optimizers[0]) as one,
            torch_bf16.exact_weights(models[1], optimizers[1]) as two,
        ):
            for name in one:
                one[name] = two[name] = (one[name] + two[name]) / 2

    def by_data(models, optimizers):
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            p.data = (p.data + q.data) / 2
            q.data = p.data.clone()

    torch.manual_seed(0)
    fp32 = run(None, by_data)
    assert fp32 == pytest.approx(64 * 1.25e-5, rel=1e-2)
    for recipe in ("bf16-fp32-master", "bf16-stochastic"):
        torch.manual_seed(0)
        assert run(recipe, exactly) == pytest.approx(fp32, rel=0.1), recipe
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="written through p.data"):
        assert run("bf16-fp32-master", by_data) < 0.8 * fp32
