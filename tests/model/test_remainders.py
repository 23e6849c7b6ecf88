"""Exact masters start from the fp32 weights that cast_model saw, on one process and on several."""

import functools

import pytest
import torch
from sync_masters_replica import initial, network, started_in_a_group, trained
from torch import nn

import torch_bf16
from torch_bf16 import Recipe, cast_model, get_recipe
from torch_bf16.model import remainders
from torch_bf16.numerics.rounding import join8, join16

BF16 = torch.bfloat16
BF16_PLUS_FP32 = Recipe("master32", weights="bf16+fp32", exp_avg="fp32", exp_avg_sq="fp32")
BF16_PLUS_8 = Recipe("24 bits", weights="bf16+8")
EXACT = {"bf16+16": get_recipe("bf16-fp32-master"), "bf16+fp32": BF16_PLUS_FP32}
every_exact = pytest.mark.parametrize("recipe", EXACT.values(), ids=EXACT)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.equal(b)


def step(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    return optimizer


def seeded(
    kind, make=lambda: nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30), nn.Conv1d(3, 4, 5))
):
    """fp32 weights with ties among them, and a module with them, cast."""
    torch.manual_seed(0)
    module = make()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p))
            # fp16's grid: every eighth weight lies in the middle between two bf16 numbers.
            p.view(-1)[::2] = p.view(-1)[::2].half().float()
    exact = [p.detach().clone() for p in module.parameters()]
    assert sum(int((p.view(torch.int32) & 0xFFFF == 0x8000).sum()) for p in exact) > 50
    return exact, cast_model(module, {**EXACT, "bf16+8": BF16_PLUS_8}[kind])


def masters(optimizer):
    for p, state in optimizer.state.items():
        yield state["master"] if "master" in state else join16(p, state["remainder16"])


def assert_masters_equal(module, exact, recipe):
    """The masters that a step with zero gradient and zero learning rate leaves."""
    optimizer = step(torch_bf16.SGD(module.parameters(), lr=0.0, recipe=recipe))
    found = list(masters(optimizer))
    assert len(found) == len(exact)
    assert all(same_bits(master, want) for master, want in zip(found, exact, strict=True))


@pytest.mark.parametrize("way", ["overwrite", "swap"])
def test_masters_start_from_the_fp32_weights_where_torch_s_conversions_replace_parameters(way):
    conversion = getattr(torch.__future__, f"set_{way}_module_params_on_conversion")
    conversion(True)
    try:
        exact, module = seeded("bf16+16")
        assert_masters_equal(module.to("cpu"), exact, EXACT["bf16+16"])
        _, module = seeded("bf16+16")
        module.float()
    finally:
        conversion(False)


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("first", ["cast", "optimizer", "converted"])
def test_masters_start_from_the_fp32_weights_exactly(kind, first):
    torch.manual_seed(0)
    exact, module = seeded(kind)
    if first == "cast":
        assert_masters_equal(module, exact, EXACT[kind])
        return
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30), nn.Conv1d(3, 4, 5))
    with torch.no_grad():
        for p, value in zip(module.parameters(), exact, strict=True):
            p.copy_(value)
    if first == "optimizer":
        optimizer = torch_bf16.AdamW(module.parameters(), lr=0.0, recipe=EXACT[kind])
    else:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)
        torch_bf16.convert(optimizer, EXACT[kind], model=module)
    cast_model(module, EXACT[kind])
    assert all(same_bits(a, b) for a, b in zip(masters(step(optimizer)), exact, strict=True))


def test_vectors_have_exact_masters_in_the_stochastic_recipe_too():
    torch.manual_seed(0)
    module = nn.LayerNorm(100)
    nn.init.normal_(module.weight)
    exact = [p.detach().clone() for p in module.parameters()]
    assert_masters_equal(cast_model(module), exact, "bf16-stochastic")


@pytest.mark.parametrize("cast_for", EXACT)
def test_a_cast_for_the_other_master_is_off_by_fp32s_last_place_at_ties_alone(cast_for):
    exact, module = seeded(cast_for)
    other = EXACT["bf16+fp32" if cast_for == "bf16+16" else "bf16+16"]
    weights = [p.detach().clone() for p in module.parameters()]
    optimizer = step(torch_bf16.SGD(module.parameters(), lr=0.0, recipe=other))
    assert all(same_bits(p.detach(), w) for p, w in zip(module.parameters(), weights, strict=True))
    found, want = (torch.cat([t.view(-1) for t in each]) for each in (masters(optimizer), exact))
    differs = found != want
    tie = want.view(torch.int32) & 0xFFFF == 0x8000
    assert differs.any()
    assert not (differs & ~tie).any()
    assert (found.view(torch.int32) - want.view(torch.int32)).abs().max() == 1


def test_masters_of_24_bits_start_from_the_nearest_to_the_fp32_weights():
    for cast_for in (*EXACT, "bf16+8"):
        exact, module = seeded(cast_for)
        weights = [p.detach().clone() for p in module.parameters() if p.ndim > 1]
        optimizer = step(torch_bf16.SGD(module.parameters(), lr=0.0, recipe=BF16_PLUS_8))
        matrices = [(p, state) for p, state in optimizer.state.items() if p.ndim > 1]
        exact = [each for each in exact if each.ndim > 1]
        for (p, state), weight, want in zip(matrices, weights, exact, strict=True):
            assert same_bits(p.detach(), weight)
            got = join8(p.detach(), state["remainder8"])
            units = (got.view(torch.int32) - want.view(torch.int32)).abs()
            # Half a unit of 24 bits, and a whole one where the visible half leaves no other.
            lower = want.view(torch.int32) & 0xFFFF
            last = (lower >= 0x7F80) & (lower <= 0x8000)
            assert (units[~last] <= 128).all()
            assert (units[last] <= 256).all()


def test_without_the_cast_masters_start_from_bf16_weights():
    """The control: what the halves are kept for."""
    exact, _ = seeded("bf16+16")
    module = nn.ParameterList(p.to(BF16) for p in exact)
    optimizer = step(torch_bf16.SGD(module.parameters(), lr=0.0, recipe="bf16-fp32-master"))
    assert not any(m.equal(want) for m, want in zip(masters(optimizer), exact, strict=True))


@pytest.mark.parametrize("kind", ["bf16+16", "bf16+fp32"])
def test_weights_that_change_places_start_from_what_they_are(kind):
    """Within 64 elements, whose bits are compared by one sum."""
    recipe = EXACT[kind]
    module = cast_model(nn.Linear(128, 128, bias=False), recipe)
    order = torch.arange(128).view(-1, 64).flip(1).reshape(-1)
    module.weight.data = module.weight.data[:, order].contiguous()
    written = module.weight.detach().float()
    optimizer = torch_bf16.SGD(module.parameters(), lr=0.0, recipe=recipe)
    assert same_bits(optimizer.exact_weight(module.weight), written)


WRITES = {
    "in place": lambda p: p.fill_(1.25),
    "through data": lambda p: p.data.fill_(1.25),
    "to zero": lambda p: p.data.zero_(),
    "mask": lambda p: p.data.mul_(torch.arange(p.numel()).view_as(p) % 2),
    "copy": lambda p: p.copy_(torch.full_like(p, 3.0)),
}


@every_exact
@pytest.mark.parametrize("write", WRITES)
def test_a_weight_written_after_the_cast_starts_from_what_was_written(recipe, write):
    exact, module = seeded(recipe.weights)
    with torch.no_grad():
        WRITES[write](module[0].weight)
    written = module[0].weight.detach().float()
    optimizer = step(torch_bf16.SGD(module.parameters(), lr=0.0, recipe=recipe))
    first, *others = masters(optimizer)
    assert same_bits(first, written)
    assert all(same_bits(a, b) for a, b in zip(others, exact[1:], strict=True))


@every_exact
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_weights_masked_through_data_never_become_nan(recipe, backend):
    """Pruning and WGAN clipping write ``p.data``, which moves no version that one could see."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(40, 40).to(BF16))
    optimizer = torch_bf16.AdamW([p], lr=1e-3, weight_decay=0, recipe=recipe)
    optimizer.backend = backend
    mask = torch.arange(1600).view(40, 40) % 2
    for _ in range(5):
        p.grad = torch.randn_like(p)
        optimizer.step()
        p.data.mul_(mask)
    p.grad = torch.randn_like(p) * mask
    optimizer.step()
    assert p.isfinite().all()
    assert p[mask == 0].abs().max() < 0.01
    assert p[mask == 1].abs().max() > 1


@every_exact
def test_what_the_cast_took_is_freed_by_the_first_step(recipe):
    _, module = seeded(recipe.weights)
    known = set(module.parameters())
    assert known <= set(remainders._by_parameter)
    step(torch_bf16.SGD(module.parameters(), lr=0.0, recipe=recipe))
    assert not known & set(remainders._by_parameter)


def test_a_second_cast_keeps_the_masters_of_the_first():
    exact, module = seeded("bf16+16")
    cast_model(module, EXACT["bf16+16"])
    assert_masters_equal(module, exact, EXACT["bf16+16"])


@pytest.fixture(scope="module")
def replicas(ranks):
    """``replicas(scenario, kind)``: what each of two ranks found, who run it once."""
    return functools.cache(functools.partial(ranks, 2, trained))


def source():
    """The fp32 weights of rank 0."""
    return [p.detach() for p in network(0).parameters()]


def agree(first, second):
    return all(same_bits(a, b) for a, b in zip(first, second, strict=True))


def test_replicas_are_initialised_differently(ranks):
    first, second = ranks(2, initial)
    assert not any(a.equal(b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("scenario", ["synced", "plain ddp", "broadcast and synced", "uneven"])
def test_replicas_agree_on_weights_and_masters_bit_for_bit(replicas, scenario, kind):
    first, second = replicas(scenario, kind)
    for moment in ("masters at the start", "weights", "states"):
        assert agree(first[moment], second[moment]), moment
    assert not agree(first["weights"], first["weights at the start"])


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("scenario", ["synced", "broadcast and synced"])
def test_synced_masters_are_the_fp32_weights_of_the_source(replicas, scenario, kind):
    for each in replicas(scenario, kind):
        assert agree(each["masters at the start"], source())


@pytest.mark.parametrize("kind", EXACT)
def test_a_group_of_ddp_gets_the_masters_of_its_own_first_rank(ranks, kind):
    _, *members = ranks(3, started_in_a_group, kind)
    weights = [p.detach() for p in network(1).parameters()]
    assert all(agree(each, weights) for each in members)


@pytest.mark.parametrize("kind", EXACT)
def test_ddp_alone_starts_all_masters_from_the_bf16_weights(replicas, kind):
    """DDP's broadcast counts as a write, also on the rank whose weights it sends."""
    for found in replicas("plain ddp", kind):
        started = [w.float() for w in found["weights at the start"]]
        assert agree(found["masters at the start"], started)


@pytest.mark.parametrize("kind", EXACT)
def test_after_another_broadcast_than_ddps_masters_differ_until_they_are_synced(replicas, kind):
    """The control: what sync_masters is there for."""
    first, second = replicas("broadcast alone", kind)
    assert agree(first["weights at the start"], second["weights at the start"])
    assert not agree(first["masters at the start"], second["masters at the start"])


@pytest.mark.parametrize("kind", EXACT)
def test_a_weight_written_at_the_source_is_not_given_its_old_halves(replicas, kind):
    """The source zeroes a weight after the cast; the other rank knows of no cast at all."""
    for each in replicas("uneven", kind):
        first, *others = each["masters at the start"]
        assert first.eq(0).all()
        assert agree(others, source()[1:])
