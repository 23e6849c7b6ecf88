"""One call casts and converts; two recipes that disagree are refused before anything changes."""

import pytest
import torch
from foreign_cases import sparse_and_dense
from optimizer_wrappers import Around
from torch import nn

import torch_bf16
from torch_bf16 import get_recipe, plugin_api, prepare

NAMES = ("bf16-stochastic", "bf16-fp32-master")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def trained(model, *optimizers):
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("recipe", NAMES)
def test_it_is_a_cast_and_a_conversion_by_one_recipe(recipe):
    model, twin = network(), network()
    given = torch.optim.AdamW(model.parameters(), lr=0.01)
    found, optimizer = prepare(model, given, recipe, backend="eager")
    assert found is model
    assert optimizer is given
    assert (optimizer.recipe.name, optimizer.backend) == (recipe, "eager")
    torch_bf16.cast_model(twin, recipe)
    other = torch_bf16.AdamW(twin.named_parameters(), lr=0.01, recipe=recipe, backend="eager")
    assert all(map(torch.equal, trained(model, optimizer), trained(twin, other)))


def test_several_optimizers_ours_and_others_in_one_call():
    model = network()
    pair = (
        torch_bf16.Lion(model[0].parameters(), lr=0.01),
        torch.optim.Adamax(model[1].parameters(), lr=0.01),
    )
    assert prepare(model, pair, backend="eager") == (model, pair)
    assert [each.backend for each in pair] == ["eager", "eager"]
    before = [p.detach().clone() for p in model.parameters()]
    assert not any(map(torch.equal, before, trained(model, *pair)))


def test_an_optimizer_that_cannot_be_converted_may_train_what_stays_fp32():
    torch.manual_seed(0)
    model, pair = sparse_and_dense()
    with pytest.raises(NotImplementedError, match="SparseAdam cannot be converted"):
        prepare(model, pair)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    prepare(model, pair, get_recipe(NAMES[0], keep_fp32=("0",), compute="fp32"))
    assert type(pair[0]) is torch.optim.SparseAdam
    assert isinstance(pair[1], torch_bf16.AdamW)
    assert [p.dtype for p in model.parameters()] == [torch.float32, *2 * [torch.bfloat16]]
    before = model[0].weight.detach().clone()
    torch_bf16.convert(pair[0], get_recipe(NAMES[0], keep_fp32=("0",)), model=model)
    model(torch.tensor([1, 3])).float().square().mean().backward()
    for optimizer in pair:
        optimizer.step()
    assert (model[0].weight != before).any(1).nonzero().flatten().tolist() == [1, 3]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_an_optimizer_it_is_not_given_may_train_a_sparse_embedding_in_fp32(kind):
    recipe = get_recipe(NAMES[0], keep_fp32=("0",), compute="fp32")

    def stepped(*, given: bool) -> torch.Tensor:
        model, (_, dense) = sparse_and_dense()
        sparse = kind([model[0].weight], lr=0.1)
        prepare(model, [sparse, dense] if given else dense, recipe)
        before = model[0].weight.detach().clone()
        model(torch.tensor([1, 3])).float().square().mean().backward()
        for optimizer in (sparse, dense):
            optimizer.step()
        return (model[0].weight != before).any(1).nonzero().flatten()

    with pytest.raises(ValueError, match="such as SGD or Adagrad, that prepare is not given"):
        stepped(given=True)
    assert stepped(given=False).tolist() == [1, 3]


def test_it_can_be_called_again_with_the_same_recipe():
    model = network()
    optimizer = torch_bf16.AdamW(model.parameters(), recipe=get_recipe(NAMES[1], name="mine"))
    for _ in range(2):
        assert prepare(model, optimizer, NAMES[1]) == (model, optimizer)


def test_a_recipe_that_was_changed_is_told_from_the_one_of_its_name():
    model = network()
    optimizer = torch_bf16.AdamW(model.parameters(), recipe=get_recipe(NAMES[1], weights="bf16+8"))
    said = rf"'{NAMES[1]} with weights=bf16\+8' and prepare was asked for '{NAMES[1]}': "
    with pytest.raises(ValueError, match=said):
        prepare(model, optimizer, NAMES[1])


def test_an_optimizer_of_another_recipe_is_refused_with_both_names():
    model = network()
    optimizer = torch_bf16.AdamW(model.parameters(), recipe=NAMES[1])
    expected = (
        r"'bf16-fp32-master' and prepare was asked for 'bf16-stochastic': weights is 'bf16.16'"
    )
    with pytest.raises(ValueError, match=f"the AdamW was made with recipe {expected}"):
        prepare(model, optimizer)
    assert model[0].weight.dtype == torch.float32


@pytest.mark.parametrize("cast", NAMES)
def test_a_model_cast_by_another_recipe_is_refused_with_both_names(cast):
    model = torch_bf16.cast_model(network(), cast)
    asked = next(name for name in NAMES if name != cast)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        ValueError, match=f"Sequential was cast by recipe '{cast}' and prepare .* '{asked}'"
    ):
        prepare(model, optimizer, asked)
    assert type(optimizer) is torch.optim.AdamW
    prepare(model.float(), optimizer, asked)
    assert model[0].weight.dtype == torch.bfloat16


def test_a_model_whose_vectors_were_cast_otherwise_is_refused():
    model = torch_bf16.cast_model(network(), get_recipe(NAMES[0], vectors="like_matrices"))
    with pytest.raises(ValueError, match="vectors is 'like_matrices' there and 'exact' here"):
        prepare(model, torch.optim.AdamW(model.parameters()))


def test_a_step_that_would_lose_the_masters_of_vectors_alone_is_refused():
    model = torch_bf16.cast_model(network())
    recipe = get_recipe(NAMES[0], vectors="like_matrices")
    with pytest.raises(ValueError, match="keeps none for 2 of its parameters"):
        trained(model, torch_bf16.SGD(model.parameters(), lr=0.1, recipe=recipe))


def test_what_is_said_of_an_own_step_reaches_those_that_take_one():
    model = network()
    pair = (
        torch.optim.AdamW(model[0].parameters(), lr=0.01),
        torch.optim.Adadelta(model[1].parameters(), lr=0.01),
    )
    prepare(model, pair, backend="eager", roles={"square_avg": "exp_avg_sq"}, elementwise=True)
    trained(model, *pair)
    state = pair[1].state[model[1].weight]
    assert {state[key].dtype for key in ("square_avg", "acc_delta")} == {
        torch.bfloat16,
        torch.float32,
    }


@pytest.mark.parametrize(
    ("made", "options", "match"),
    [
        (torch.optim.AdamW, {"elementwise": True}, "AdamW has a kernel or was converted before"),
        (torch.optim.AdamW, {"roles": {"z": "exp_avg"}}, "AdamW has a kernel"),
        (torch.optim.Adadelta, {"roles": {"z": "int3"}}, "takes the format of 'exp_avg' or"),
        (torch.optim.Adadelta, {"roles": ["z"]}, r"roles=\['z'\] must be a dict"),
        (torch.optim.Adadelta, {"roles": {"z": []}}, "takes the format of 'exp_avg' or"),
    ],
    ids=["elementwise", "roles", "format", "list", "list as format"],
)
def test_what_is_said_of_no_own_step_is_refused_before_the_cast(made, options, match):
    model = network()
    with pytest.raises(ValueError, match=match):
        prepare(model, made(model.parameters()), **options)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_wrapper_around_ours_is_prepared_as_ours_is():
    model = network()
    base = torch_bf16.AdamW(model.named_parameters(), recipe=NAMES[1])
    for asked in (NAMES[0], get_recipe(NAMES[1], exp_avg="bf16_nearest")):
        with pytest.raises(ValueError, match="the AdamW in this Around was made with recipe"):
            prepare(model, Around(base), asked)
    with pytest.raises(ValueError, match="Around has a kernel or was converted before"):
        prepare(model, Around(base), NAMES[1], elementwise=True)
    assert model[0].weight.dtype == torch.float32
    prepare(model, Around(base), NAMES[1], backend="eager")
    assert model[0].weight.dtype == torch.bfloat16
    assert base.backend == "eager"


class Holder:
    """Wraps an optimizer and is none itself, as those of fairseq and schedulefree."""

    def __init__(self, base):
        self.base = base


def test_an_object_that_holds_an_optimizer_is_refused_with_the_attribute_to_pass():
    model = network()
    holder = Holder(torch.optim.AdamW(model.parameters()))
    for take in (prepare, lambda model, each: torch_bf16.convert(each, model=model)):
        with pytest.raises(ValueError, match=r"Holder is none.*Pass the AdamW in its attribute ba"):
            take(model, holder)
    assert model[0].weight.dtype == torch.float32
    prepare(model, holder.base)
    assert model[0].weight.dtype == torch.bfloat16


def with_own_step(parameters):
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step = lambda closure=None: None
    return optimizer


@pytest.mark.parametrize(
    ("refused", "match"),
    [
        (with_own_step, "step method of this AdamW was replaced"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), "differentiable=True"),
    ],
    ids=["own-step", "differentiable"],
)
def test_what_cannot_be_converted_is_refused_before_the_cast(refused, match):
    model = network()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(NotImplementedError, match=match):
        prepare(model, [first, refused(model[1].parameters())])
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert type(first) is torch.optim.SGD


class Closed(torch.optim.LBFGS):
    pass


class Stepping:
    def __init__(self, parameters):
        self.parameters = parameters

    def step(self):
        pass


class Environment(nn.Module):
    """A module that steps, as the environments of TorchRL do."""

    def step(self):
        raise AssertionError


@pytest.mark.parametrize(
    ("optimizer", "error", "match"),
    [
        (lambda p: torch.optim.AdamW, ValueError, "not type: make it first, for example torch"),
        (Stepping, ValueError, "Stepping is none, so that its parameters and states are not known"),
        (lambda p: Environment(), ValueError, "a sequence of them, not Environment"),
        (lambda p: None, ValueError, "prepare takes an optimizer or a sequence of them, not None"),
        (lambda p: [p], ValueError, "a sequence of them, not list"),
        (lambda p: p, ValueError, "a sequence of them, not Parameter"),
        (lambda p: [], ValueError, "given no optimizer; pass each"),
        (lambda p: [torch.optim.SGD(p)] * 2, ValueError, "given one optimizer twice; pass each"),
        (Closed, NotImplementedError, "Closed"),
    ],
    ids=[
        "class",
        "no-optimizer",
        "module",
        "none",
        "groups",
        "parameters",
        "nothing",
        "twice",
        "closure",
    ],
)
def test_what_cannot_be_prepared_leaves_the_model_as_it_was(optimizer, error, match):
    model = network()
    with pytest.raises(error, match=match):
        prepare(model, optimizer(list(model.parameters())))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match=r"prepare was given a list and takes a torch.nn.Module"):
        prepare([model], torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("way", [prepare, lambda m, o: torch_bf16.convert(o, model=m)])
def test_a_parameter_that_cannot_be_trained_is_refused_by_the_name_that_the_model_has(way):
    model = network()
    model[1].wave = nn.Parameter(torch.ones(3, dtype=torch.complex128))
    optimizer = torch.optim.SGD([*model[0].parameters(), model[1].wave], lr=0.1)
    with pytest.raises(ValueError, match=r"parameter '1.wave', number 2 of group 0, shape \(3,\)"):
        way(model, optimizer)


def test_an_optimizer_of_another_model_and_an_unknown_backend_are_refused_before_the_cast():
    model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="none of its parameters, so that nothing would train it"):
        torch_bf16.prepare(model, torch.optim.AdamW(other.parameters()))
    with pytest.raises(ValueError, match="unknown backend 'foo'; known backends"):
        torch_bf16.prepare(model, torch.optim.AdamW(model.parameters()), backend="foo")
    assert model.weight.dtype == torch.float32


def replaced(layer, trains=True):
    layer.weight = nn.Parameter(layer.weight.detach().float(), requires_grad=trains)
    return layer.weight


def test_an_optimizer_whose_model_has_other_parameters_by_now_is_refused_by_name():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    prepare(model, optimizer)
    new = replaced(model[1])
    match = r"1 parameters of the Sequential \('1.weight' first\) are no longer .* this AdamW has"
    with pytest.raises(torch_bf16.StateMismatchError, match=match):
        prepare(model, optimizer)
    with pytest.raises(torch_bf16.StateMismatchError, match=match):
        plugin_api.refuse_replaced([Around(optimizer)])
    assert new.dtype == torch.float32
    other = torch.optim.AdamW([new])
    prepare(model, [optimizer, other])
    plugin_api.refuse_replaced([optimizer], [other])


@pytest.mark.parametrize("way", ["frozen", "added", "taken out", "of a part", "of two models"])
def test_what_has_its_parameters_elsewhere_for_a_reason_is_prepared_again(way):
    model, scale = network(), nn.Parameter(torch.ones(1))
    trained = model[0] if way == "of a part" else model
    groups = [{"params": [*trained.parameters()]}, {"params": [scale]}]
    if way == "of two models":
        groups.append({"params": [*network().parameters()]})
    optimizer = torch.optim.AdamW(groups)
    prepare(model, optimizer)
    if way == "taken out":
        model[1] = nn.Identity()
    else:
        new = replaced(model[1], trains=way != "frozen")
    if way in ("added", "of two models"):
        optimizer.add_param_group({"params": [new]})
    prepare(model, optimizer)


@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])
def test_modules_that_have_no_truth_value_when_compared_are_trained_like_others(recipe):
    """tensordict's TensorDictParams, of which torchrl's losses are made, is one."""

    class Compared(nn.Linear):
        def __eq__(self, other):
            raise RuntimeError("no truth value")

        __hash__ = nn.Linear.__hash__

    weights = []
    for kind in (nn.Linear, Compared):
        torch.manual_seed(0)
        model = nn.Sequential(kind(8, 8), kind(8, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for part in (*model, *model):
            torch_bf16.cast_model(part, recipe)
        torch_bf16.prepare(model, optimizer, recipe, backend="eager")
        model(torch.ones(2, 8).bfloat16()).sum().backward()
        optimizer.step()
        weights.append([optimizer.exact_weight(p) for p in model.parameters()])
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)


def test_a_state_that_does_not_fit_is_told_with_what_was_done_before_it():
    parts = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in parts]
    for part, optimizer in zip(parts, optimizers, strict=True):
        part(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    optimizers[1].state[parts[1].weight]["exp_avg"] = torch.zeros(3)
    with pytest.raises(
        torch_bf16.StateMismatchError, match=r"cast by now, and 1 of 2 optimizers converted$"
    ):
        prepare(nn.ModuleList(parts), optimizers)
    assert isinstance(optimizers[0], torch_bf16.AdamW)
    assert type(optimizers[1]) is torch.optim.AdamW
