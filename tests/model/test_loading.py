"""fp32 weights that a cast model loads keep what bf16 lacks of them, as those that are cast do."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import torch_bf16
from torch_bf16 import torch_patches
from torch_bf16.model import remainders
from torch_bf16.sharding import shard_of
from torch_bf16.torch_patches import SWITCH

RECIPES = {
    "remainder": torch_bf16.get_recipe("bf16-fp32-master"),
    "beside": torch_bf16.Recipe("beside", weights="bf16+fp32"),
    "upper": torch_bf16.Recipe("upper", weights="bf16+8"),
}


def network(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    with torch.no_grad():
        # Halfway between two bf16 numbers, where torch rounds to even and a master's upper half
        # away from zero.
        net[0].weight[:2] = torch.tensor(0x3F808000, dtype=torch.int32).view(torch.float32)
        net[0].weight[2:4] = torch.tensor(0x3F818000, dtype=torch.int32).view(torch.float32)
    return net


def prepared(net, recipe, made=torch.optim.AdamW):
    optimizer = made(net.parameters(), lr=1e-2)
    torch_bf16.prepare(net, optimizer, recipe)
    return optimizer


def train(net, optimizer, steps=2):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(4, 8, generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            net(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def exact(net, optimizer):
    return [optimizer.exact_weight(p).clone() for p in net.parameters()]


def assert_equal(some, others):
    for a, b in zip(some, others, strict=True):
        assert torch.equal(a, b)


def resumed(recipe, saved, load_first):
    """A net and its optimizer that go on from a run of stock fp32."""
    net, (weights, states) = network(3), saved
    if load_first:
        net.load_state_dict(weights)
    optimizer = prepared(net, recipe)
    if not load_first:
        net.load_state_dict(weights)
    optimizer.load_state_dict(states)
    return net, optimizer


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_loading_after_the_cast_is_loading_before_it(recipe):
    source = network().state_dict()
    before, after = network(1), network(2)
    before.load_state_dict(source)
    ours = prepared(before, recipe)
    theirs = prepared(after, recipe)
    after.load_state_dict(source)
    if recipe is RECIPES["remainder"]:
        assert_equal(exact(after, theirs), source.values())
    train(before, ours)
    train(after, theirs)
    assert_equal(exact(before, ours), exact(after, theirs))


def cast_without_masters(net):
    torch_bf16.cast_model(net)


def cast_for_masters_of_vectors_alone(net):
    torch_bf16.cast_model(net, torch_bf16.get_recipe("bf16-stochastic", vectors="like_matrices"))


@pytest.mark.parametrize(
    "before",
    [cast_without_masters, cast_for_masters_of_vectors_alone, nn.Module.bfloat16],
    ids=["validated", "vectors", "built in bf16"],
)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_a_module_that_was_bf16_before_loads_as_a_fresh_one_does(recipe, before):
    """A host casts it again by the recipe of this run, which finds nothing left to cast."""
    source, nets = network().state_dict(), [network(1), network(2)]
    before(nets[1])
    optimizers = []
    for net in nets:
        torch_bf16.cast_model(net, recipe)
        optimizers.append(torch_bf16.AdamW(net.named_parameters(), lr=1e-2, recipe=recipe))
        net.load_state_dict(source)
    found, fresh = (exact(*each) for each in zip(reversed(nets), reversed(optimizers), strict=True))
    assert_equal(found, fresh)
    if recipe is RECIPES["remainder"]:
        assert_equal(found, source.values())


def test_a_model_that_came_in_bf16_is_prepared_by_one_recipe_after_another():
    """None of its bits are lost by the first, and what it loads follows the last."""
    net, source = network(1).bfloat16(), network().state_dict()
    prepared(net, "bf16-stochastic")
    optimizer = prepared(net, RECIPES["remainder"])
    net.load_state_dict(source)
    assert_equal(exact(net, optimizer), source.values())


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_a_run_of_stock_fp32_goes_on_alike_in_either_order(recipe):
    stock = network()
    adamw = torch.optim.AdamW(stock.parameters(), lr=1e-2)
    train(stock, adamw)
    saved = stock.state_dict(), adamw.state_dict()
    runs = [resumed(recipe, saved, load_first) for load_first in (True, False)]
    if recipe is not RECIPES["upper"]:
        assert_equal(exact(*runs[1]), stock.state_dict().values())
    for run in runs:
        train(*run)
    assert_equal(exact(*runs[0]), exact(*runs[1]))


@pytest.mark.parametrize("joins", [False, True], ids=["same set", "another set"])
@pytest.mark.parametrize("made", [torch.optim.AdamW, torch.optim.Adamax])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_weights_that_are_loaded_between_steps_are_exact(recipe, made, joins):
    """With kernels, and where the optimizer steps by its own code on fp32 copies."""
    net, source = network(1), network().state_dict()
    optimizer = prepared(net, recipe, made)
    net[0].bias.requires_grad_(not joins)
    train(net, optimizer)
    net[0].bias.requires_grad_()
    copied = {k: v.clone() for k, v in optimizer.state[net[2].weight].items() if "exp" in k}
    net.load_state_dict(source)
    if recipe is not RECIPES["upper"]:
        assert_equal(exact(net, optimizer), source.values())
    saved = torch_bf16.fp32_state_dict(net, optimizer)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for found in (exact(net, optimizer), saved.values()):
        for mine, theirs in zip(found, source.values(), strict=True):
            bound = 2.0**-16 * theirs.abs() if recipe is RECIPES["upper"] else torch.zeros(())
            assert ((mine - theirs).abs() <= bound).all()
    assert copied.keys() <= optimizer.state[net[2].weight].keys()
    assert all(remainders.find_remainder(shard_of(p)) is None for p in net.parameters())


@pytest.mark.parametrize("made", [torch.optim.AdamW, torch.optim.Adamax])
@pytest.mark.parametrize("recipe", [RECIPES["remainder"], RECIPES["beside"]], ids=lambda r: r.name)
def test_weights_that_are_loaded_between_steps_are_saved_exactly(recipe, made):
    net, source = network(1), network().state_dict()
    optimizer = prepared(net, recipe, made)
    train(net, optimizer)
    net.load_state_dict(source)
    saved = net.state_dict(), optimizer.state_dict()
    again = network(2)
    other = prepared(again, recipe, made)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert_equal(exact(again, other), source.values())


@pytest.mark.parametrize("made", [torch.optim.AdamW, torch.optim.Adamax])
@pytest.mark.parametrize("recipe", [RECIPES["remainder"], RECIPES["beside"]], ids=lambda r: r.name)
def test_fp32_weights_that_are_loaded_after_states_replace_their_masters(recipe, made):
    net = network(1)
    optimizer = prepared(net, recipe, made)
    train(net, optimizer)
    saved = net.state_dict(), optimizer.state_dict()
    again, trained = network(2), network()
    other = prepared(again, recipe, made)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    # Numbers that bf16 holds, such as a norm's ones, would be taken for those of the states.
    train(trained, torch.optim.AdamW(trained.parameters()))
    source = trained.state_dict()
    again.load_state_dict(source)
    assert_equal(exact(again, other), source.values())
    for parameter in again.parameters():
        parameter.grad = torch.zeros_like(parameter)
    other.param_groups[0]["lr"] = 0.0
    other.step()
    assert_equal(exact(again, other), source.values())


@pytest.mark.parametrize("recipe", [RECIPES["remainder"], RECIPES["beside"]], ids=lambda r: r.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bf16_weights_that_are_loaded_after_states_are_those_of_their_masters(recipe, dtype):
    """Some programs save all weights as fp32 tensors."""
    net = network(1)
    optimizer = prepared(net, recipe)
    train(net, optimizer)
    again = network(2)
    other = prepared(again, recipe)
    other.load_state_dict(optimizer.state_dict())
    again.load_state_dict({name: each.to(dtype) for name, each in net.state_dict().items()})
    assert_equal(exact(again, other), exact(net, optimizer))


@pytest.mark.parametrize("looks", [False, True], ids=["", "data read"])
def test_weights_that_are_loaded_before_a_step_that_fails_stay_exact(looks):
    net, source = network(1), network().state_dict()
    optimizer = prepared(net, RECIPES["remainder"])
    train(net, optimizer)
    assert not looks or all(p.data is not None for p in net.parameters())
    net.load_state_dict(source)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises((TypeError, ValueError), match="Nothing was updated"):
        optimizer.step()
    assert_equal(exact(net, optimizer), source.values())
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert_equal(exact(net, optimizer), source.values())


def test_the_dictionary_that_was_given_keeps_its_numbers():
    net, source = network(1), network().state_dict()
    prepared(net, RECIPES["remainder"])
    net.load_state_dict(source)
    assert {each.dtype for each in source.values()} == {torch.float32}
    assert_equal(source.values(), network().state_dict().values())


def test_what_was_remembered_is_freed_by_the_first_step():
    net = network(1)
    optimizer = prepared(net, RECIPES["remainder"])
    net.load_state_dict(network().state_dict())
    train(net, optimizer, 1)
    gc.collect()
    assert all(remainders.find_remainder(shard_of(p)) is None for p in net.parameters())


def test_what_does_not_fit_is_refused_by_torch_and_remembered_of_none():
    net = network(1)
    optimizer = prepared(net, RECIPES["remainder"])
    before = exact(net, optimizer)
    source = network().state_dict()
    source["0.bias"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.bias"):
        net.load_state_dict(source)
    # torch has copied what fitted: rounded, as its module loads all or nothing for us.
    found = exact(net, optimizer)
    assert torch.equal(found[0], net[0].weight.float())
    assert torch.equal(found[1], before[1])
    assert torch.equal(found[-1], source["2.bias"])


def test_a_write_after_loading_counts():
    net = network(1)
    optimizer = prepared(net, RECIPES["remainder"])
    net.load_state_dict(network().state_dict())
    with torch.no_grad():
        net[0].weight.add_(1)
    assert torch.equal(optimizer.exact_weight(net[0].weight), net[0].weight.float())


def test_without_masters_torch_rounds():
    net, source = network(1), network().state_dict()
    prepared(net, "bf16-stochastic")
    net.load_state_dict(source)
    assert torch.equal(net[0].weight, source["0.weight"].bfloat16())
    assert remainders.find_remainder(shard_of(net[0].weight)) is None


def test_assigned_weights_are_those_that_were_given():
    net, source = network(1), network().state_dict()
    torch_bf16.cast_model(net, RECIPES["remainder"])
    net.load_state_dict(source, assign=True)
    assert net[0].weight.data_ptr() == source["0.weight"].data_ptr()


def test_without_the_patch_masters_start_from_bf16(monkeypatch):
    """What the table of patches says of it is true."""
    torch_patches.restore()
    monkeypatch.setenv(SWITCH, "load_from_state_dict")
    net, source = network(1), network().state_dict()
    optimizer = prepared(net, RECIPES["remainder"])
    net.load_state_dict(source)
    assert torch.equal(optimizer.exact_weight(net[2].weight), source["2.weight"].bfloat16().float())


def test_shards_load_their_part(one_rank):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    net, source = network(1), network().state_dict()
    for each in (net[0], net[1], net[2], net):
        fully_shard(each, mesh=one_rank)
    optimizer = prepared(net, RECIPES["remainder"])
    set_model_state_dict(net, source, options=StateDictOptions(full_state_dict=True))
    found = [each.full_tensor() for each in exact(net, optimizer)]
    assert_equal(found, network().state_dict().values())


def test_the_dictionary_of_a_module_alone_keeps_its_numbers_too():
    net, given = network(), network(1)[0].state_dict()
    prepared(net, RECIPES["remainder"])
    before = {name: each.clone() for name, each in given.items()}
    net[0]._load_from_state_dict(given, "", {}, True, [], [], [])
    assert_equal(given.values(), before.values())


def test_nothing_is_kept_of_tied_weights_after_the_first_step():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
            self.head.weight = self.words.weight

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = torch_bf16.prepare(model, optimizer, RECIPES["remainder"])
    loaded = Tied().state_dict()
    model.load_state_dict(loaded)
    assert torch.equal(optimizer.exact_weight(model.head.weight), loaded["words.weight"])
    model.head.weight.grad = torch.ones_like(model.head.weight)
    optimizer.step()
    assert not any(each in remainders._by_owner for each in model.modules())


HOOKED = {
    "renamed": lambda given: given,
    "permuted": lambda given: given.flip(0),
    "scaled": lambda given: given * 3,
}


@pytest.mark.parametrize("change", HOOKED.values(), ids=list(HOOKED))
def test_weights_that_the_module_s_own_hook_changes_as_they_are_loaded_are_exact(change):
    net, given = nn.Linear(8, 16), torch.randn(16, 8)
    optimizer = prepared(net, RECIPES["remainder"])

    def hook(module, state_dict, prefix, *_args):
        state_dict[prefix + "weight"] = change(state_dict.pop(prefix + "old"))

    net.register_load_state_dict_pre_hook(hook)
    hooks = dict(net._load_state_dict_pre_hooks)
    for _ in range(2):
        net.load_state_dict({"old": given, "bias": torch.zeros(16)})
        assert torch.equal(optimizer.exact_weight(net.weight), change(given))
    assert net._load_state_dict_pre_hooks == hooks


def test_loads_without_a_step_between_them_leave_one_remainder():
    model = torch_bf16.cast_model(nn.Linear(2, 2), "bf16-fp32-master")
    for _ in range(3):
        model.load_state_dict(nn.Linear(2, 2).state_dict())
    remainder = remainders.find_remainder(shard_of(model.weight))
    assert len(remainder.places) == 1
