"""Target networks and averages that a program blends in bf16 by itself are named once."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16 import torch_patches
from torch_bf16.model import blended_weights, watched_weight
from torch_bf16.model.copied_weights import watched_copies
from torch_bf16.model.watched_weight import bits_of
from torch_bf16.torch_patches import SWITCH

STEPS = 40


class Siamese(nn.Module):
    """A network that is trained, and one that follows it."""

    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(32, 32))
        self.target = nn.Sequential(nn.Linear(32, 32))
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)

    def forward(self, x):
        return self.online(x)


def mul_add(target, weight):
    target.mul_(0.99).add_(weight, alpha=0.01)


def assign_data(target, weight):
    target.data = target.data * 0.99 + weight.data * 0.01


def write_through_data(target, weight):
    target.data.copy_(target.data * 0.99 + weight.data * 0.01)


def lerp(target, weight):
    target.lerp_(weight.to(target.dtype), 0.01)


def foreach_lerp(target, weight):
    torch._foreach_lerp_([target], [weight], 0.01)


def copy_each_time(target, weight):
    target.copy_(weight)


def copy_through_data(target, weight):
    target.data.copy_(weight.data)


def copy_now_and_then(target, weight):
    copy_now_and_then.calls += 1
    if copy_now_and_then.calls % 8 < 2:
        target.copy_(weight)


def write_the_same(target, weight):
    target.mul_(1.0)


copy_now_and_then.calls = 0


def train(model, optimizer, online, target, blend, steps=STEPS):
    """Steps with a small learning rate, and a write to the target after each."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(8, 32, generator=generator)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, weight in zip(target.parameters(), online.parameters(), strict=True):
                blend(mine, weight)


def prepared(model, recipe="bf16-stochastic", **options):
    torch.manual_seed(0)
    trained = [p for p in model.parameters() if p.requires_grad]
    recipe = torch_bf16.get_recipe(recipe, **options)
    return torch_bf16.prepare(model, torch.optim.AdamW(trained, lr=1e-3), recipe)


@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])
@pytest.mark.parametrize("blend", [mul_add, assign_data, write_through_data, lerp, foreach_lerp])
@pytest.mark.parametrize("in_a_group", [False, True])
def test_a_target_network_in_bf16_is_named_once(blend, recipe, in_a_group):
    model = Siamese()
    model.online.append(nn.Linear(32, 32))
    model.target.append(copy.deepcopy(model.online[-1])).requires_grad_(False)
    parameters = model.parameters() if in_a_group else model.online.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    torch_bf16.prepare(model, optimizer, recipe)
    with pytest.warns(UserWarning, match=r"'target.\d.weight' .*\['target\*'\]") as caught:
        train(model, optimizer, model.online, model.target, blend)
    assert len(caught) == 1


def test_all_modules_that_are_blended_are_named_and_no_other():
    """As in lightly's BYOL, whose projection head follows, too."""
    model = Siamese()
    for name in ("head", "head_target", "frozen"):
        model.add_module(name, nn.Sequential(nn.Linear(32, 32)).requires_grad_(name == "head"))
    model, optimizer = prepared(model)
    online = nn.ModuleList([model.online, model.head])
    target = nn.ModuleList([model.target, model.head_target])
    with pytest.warns(UserWarning, match=r"=\['head_target\*', 'target\*'\] keeps it in fp32"):
        train(model, optimizer, online, target, mul_add)


def test_what_the_warning_says_works():
    model, optimizer = prepared(Siamese(), keep_fp32=("target*",))
    before = model.target[0].weight.clone()
    train(model, optimizer, model.online, model.target, mul_add)
    assert model.target[0].weight.dtype == torch.float32
    assert (model.target[0].weight != before).float().mean() > 0.99


def test_a_copy_of_a_cast_model_that_follows_it_is_named_once_and_float_repairs_it():
    model, optimizer = prepared(nn.Linear(32, 32))
    average = copy.deepcopy(model)
    with pytest.warns(
        UserWarning, match=r"a copy of 'weight' is bfloat16.*call float\(\)"
    ) as caught:
        train(model, optimizer, model, average, mul_add)
    assert len(caught) == 1
    average = copy.deepcopy(model).float()
    train(model, optimizer, model, average, mul_add, 2 * STEPS)


def tensors_that_follow(model, blend, make, recipe="bf16-stochastic"):
    """Messages about a list of tensors that is made after the cast and moved at each step."""
    model, optimizer = prepared(model, recipe)
    tensors = [make(p) for p in model.parameters()]
    x = torch.randn(16, 32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            model(x.bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for tensor, p in zip(tensors, model.parameters(), strict=True):
                    blend(tensor, p)
    return [str(each.message) for each in caught]


def subtract_difference(tensor, weight):
    tensor.sub_(0.004 * (tensor - weight))


@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])
def test_an_average_in_a_list_is_named_once(recipe):
    make = lambda p: p.clone().detach()  # noqa: E731
    (message,) = tensors_that_follow(nn.Linear(32, 32), subtract_difference, make, recipe)
    assert message.startswith("a tensor outside of all modules follows 'weight' and is bfloat16")
    assert "or of p.float()" in message


def test_tensors_without_memory_and_negated_ones_are_passed_over():
    freed = torch.ones(2, 32, 32, dtype=torch.bfloat16)[1]
    freed.untyped_storage().resize_(0)
    negated = torch._neg_view(torch.ones(32, 32, dtype=torch.bfloat16))
    make = lambda p: p.detach().float()  # noqa: E731
    assert tensors_that_follow(nn.Linear(32, 32), subtract_difference, make) == []
    assert (freed.data_ptr() != 0, negated.is_neg()) == (True, True)


@pytest.mark.parametrize(
    ("make", "blend"),
    [
        (lambda p: p.detach().float(), subtract_difference),
        (lambda p: p.detach().clone(), copy_each_time),
        (lambda p: torch.randn_like(p), lambda tensor, _: tensor[:2].mul_(1.01)),
    ],
    ids=["an average in fp32", "a copy", "other numbers"],
)
def test_other_tensors_of_a_weights_shape_are_not_named(make, blend):
    assert tensors_that_follow(nn.Linear(32, 32), blend, make) == []


@pytest.mark.parametrize(
    "blend", [copy_each_time, copy_through_data, copy_now_and_then, write_the_same]
)
def test_writes_that_lose_nothing_are_not_named(blend):
    model, optimizer = prepared(Siamese())
    train(model, optimizer, model.online, model.target, blend, 2 * STEPS)


def test_two_copies_that_are_copied_in_turn_are_not_named():
    model, optimizer = prepared(nn.Linear(32, 32))
    copies, turns = [copy.deepcopy(model), copy.deepcopy(model)], iter(range(STEPS))
    for _ in range(STEPS):
        target = copies[next(turns) % 8 > 0]
        train(model, optimizer, model, target, copy_each_time, 1)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_weights_are_left_alone(layout):
    model = nn.Linear(32, 32)
    weight = torch.eye(4, dtype=torch.bfloat16).to_sparse(layout=layout)
    model.mask = nn.Parameter(weight, requires_grad=False)
    model, optimizer = prepared(model)
    for _ in range(STEPS):
        optimizer.step()


def test_a_weight_is_not_compared_with_one_whose_numbers_are_not_at_hand():
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    sharded = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16, device="meta"))
    assert watched_weight._loses_nothing(weight, bits_of(weight), sharded)


def test_numbers_that_are_replaced_by_others_are_not_named():
    model, optimizer = prepared(Siamese())
    generator = torch.Generator().manual_seed(0)

    def enqueue(target, weight):
        row = torch.randint(len(target), (1,), generator=generator)
        target[row] = torch.randn(target[row].shape, generator=generator).to(target.dtype)

    train(model, optimizer, model.online, model.target, enqueue, 2 * STEPS)


def test_weights_of_an_optimizer_that_releases_gradients_are_not_named():
    model = nn.ModuleDict({"generator": nn.Linear(32, 32), "critic": nn.Linear(32, 32)})
    optimizers = {
        name: torch.optim.AdamW(each.parameters(), lr=1e-5) for name, each in model.items()
    }
    for each in optimizers.values():
        torch_bf16.prepare(model, each, "bf16-stochastic")
    torch_bf16.release_gradients(model["critic"], optimizers["critic"])
    for _ in range(2 * STEPS):
        for name in ("critic", "generator"):
            train(model[name], optimizers[name], model[name], model[name], lambda *_: None, 1)


def test_a_copy_that_is_made_after_the_warning_brings_no_second_one():
    model, optimizer = prepared(Siamese())
    with pytest.warns(UserWarning, match=r"'target.0.weight'"):
        train(model, optimizer, model.online, model.target, mul_add)
    copy.deepcopy(model)
    train(model, optimizer, model.online, model.target, mul_add, 2 * STEPS)


@pytest.mark.parametrize("head_start", [0, 9])
def test_weights_that_other_optimizers_train_are_not_named_nor_watched(head_start):
    """Views of their weights, as plans have, look like averages; to watch them is to wait."""
    first, *_ = pairs = [prepared(nn.Linear(32, 32)) for _ in range(3)]
    views = [model.weight.detach() for model, _ in pairs]
    train(*first, first[0], first[0], lambda *_: None, head_start)
    # The search, at the eighth step, knows only optimizers that have stepped.
    found = 2 * bool(head_start)
    assert [each.kind for each in blended_weights._watch.weights].count("loose") == found
    for _ in range(STEPS):
        for model, optimizer in pairs:
            train(model, optimizer, model, model, lambda *_: None, 1)
            assert [each.kind for each in blended_weights._watch.weights].count("loose") <= found
    assert not blended_weights._watch.weights
    assert len(views) == 3


def test_an_average_that_is_rounded_stochastically_is_not_named():
    model, optimizer = prepared(nn.Linear(32, 32))
    function = torch_bf16.ema_multi_avg_fn(0.99)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=function)
    ema = torch_bf16.EMA(model, 0.99, format="bf16_stochastic")
    for _ in range(STEPS):
        train(model, optimizer, model, model, lambda *_: None, 1)
        average.update_parameters(model)
        ema.update_parameters(model)


def lerp_stochastically(tensor, weight, decay=0.999):
    """As timm.utils.ModelEmaV3 does it: random bits below the mantissa, and the rest cut off."""
    bits = (decay * tensor.float() + (1 - decay) * weight.float()).view(torch.int32)
    bits += torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)
    tensor.copy_((bits & -(1 << 16)).view(torch.float32))


def add_in_two_roundings(tensor, weight, decay=0.999):
    tensor.copy_(decay * tensor + (1 - decay) * weight)


@pytest.mark.parametrize("decay", [0.99, 0.999])
def test_an_average_that_another_library_rounds_stochastically_is_not_named(decay):
    blend = functools.partial(lerp_stochastically, decay=decay)
    model, optimizer = prepared(nn.Linear(32, 32))
    train(model, optimizer, model, copy.deepcopy(model), blend)
    make = lambda p: p.clone().detach()  # noqa: E731
    assert tensors_that_follow(nn.Linear(32, 32), blend, make) == []


@pytest.mark.parametrize("decay", [0.99, 0.996, 0.999])
@pytest.mark.parametrize("blend", [add_in_two_roundings, None], ids=["two roundings", "one"])
def test_an_average_that_is_rounded_to_nearest_is_named_at_any_decay(blend, decay):
    def blend_once(tensor, weight):
        tensor.copy_(decay * tensor.float() + (1 - decay) * weight.float())

    model, optimizer = prepared(nn.Linear(32, 32))
    blend = blend_once if blend is None else functools.partial(blend, decay=decay)
    with pytest.warns(UserWarning, match="a copy of 'weight' is bfloat16"):
        train(model, optimizer, model, copy.deepcopy(model), blend, 2 * STEPS)


def test_an_average_of_torch_is_named_by_its_own_warning_alone():
    model, optimizer = prepared(nn.Linear(32, 32))
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )

    def train_both():
        for _ in range(STEPS):
            train(model, optimizer, model, model, lambda *_: None, 1)
            average.update_parameters(model)

    with pytest.warns(UserWarning, match="AveragedModel rounds it to nearest") as caught:
        train_both()
    assert len(caught) == 1


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: nn.ParameterList(averages_of(m))])
def test_an_average_that_lerp_moves_is_named_by_its_own_warning_alone(make):
    model, optimizer = prepared(nn.Linear(32, 32))
    with pytest.warns(UserWarning, match="lerp_ rounds it to nearest") as caught:
        train(model, optimizer, model, make(model), lerp, 2 * STEPS)
    assert len(caught) == 1


def averages_of(model):
    return [each.detach().clone() for each in model.parameters()]


def test_nothing_is_kept_alive_and_nothing_looked_at_after_the_windows(monkeypatch):
    monkeypatch.setattr(blended_weights, "_WINDOWS", blended_weights._WINDOWS[:2])
    model, optimizer = prepared(nn.Linear(32, 32))
    freed = []
    average = copy.deepcopy(model)
    weakref.finalize(average, freed.append, True)
    train(model, optimizer, model, model, lambda *_: None, 12)
    del average
    gc.collect()
    assert freed
    for _ in range(1200):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, model, model, lambda *_: None, 2)
    assert not blended_weights._watch.weights
    assert not watched_copies()


def test_weights_and_copies_can_be_swapped_where_torch_is_told_to():
    model, optimizer = prepared(nn.Linear(32, 32))
    average = [each.detach().clone() for each in model.parameters()]
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assert copy.deepcopy(model).float().weight.dtype == torch.float32
        train(model, optimizer, model, nn.ParameterList(average), lambda *_: None, 12)
        assert model.float().weight.dtype == torch.float32
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_the_patch_can_be_turned_off_and_undone(monkeypatch):
    torch_patches.restore()
    stock = nn.Parameter.__deepcopy__
    torch_bf16.cast_model(nn.Linear(4, 4))
    assert nn.Parameter.__deepcopy__ is not stock
    torch_patches.restore()
    assert nn.Parameter.__deepcopy__ is stock
    monkeypatch.setenv(SWITCH, "parameter_deepcopy")
    torch_bf16.cast_model(nn.Linear(4, 4))
    assert nn.Parameter.__deepcopy__ is stock
