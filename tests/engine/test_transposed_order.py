"""Weights in channels_last, and transposed ones, are updated where they lie, with the same bits."""

import copy

import pytest
import torch
from optimizer_cases import (
    RECIPES,
    assert_same,
    make_optimizer,
    set_gradients,
    snapshot,
    take_steps,
)
from torch import nn

import torch_bf16
from torch_bf16 import Recipe
from torch_bf16.engine.batch import Batch
from torch_bf16.gradients import sums
from torch_bf16.memory import TransposedOrder, as_it_lies

BF16 = torch.bfloat16
# The dimensions as they lie in memory.
ORDERS = {
    "channels_last": ((6, 5, 3, 3), (0, 2, 3, 1)),
    "channels_last_3d": ((4, 3, 2, 3, 2), (0, 2, 3, 4, 1)),
    "transposed": ((70, 130), (1, 0)),
    "transposed convolution": ((5, 4, 2, 7), (2, 3, 0, 1)),
}


def tensor_in(order, seed=0, dtype=BF16):
    shape, dims = ORDERS[order]
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return numbers.permute(dims).contiguous().permute([dims.index(n) for n in range(len(dims))])


def pair(orders, recipe, backend, kind="adamw"):
    """An optimizer over weights in these orders, and one over the same weights in rows."""
    lying = {each: nn.Parameter(tensor_in(each, n)) for n, each in enumerate(orders)}
    rows = {each: nn.Parameter(p.detach().contiguous()) for each, p in lying.items()}
    return [make_optimizer(kind, recipe, backend, each.items()) for each in (lying, rows)]


def weights_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def copied(optimizer):
    return [launch.copies for launch in optimizer._engine.plan._launches]


def lies_like(weight, tensor):
    return tensor.stride() == weight.stride()


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_have_the_bits_of_weights_in_rows_and_copy_nothing(recipe, backend):
    lying, rows = pair(ORDERS, recipe, backend)
    for seed in range(3):
        for each in (lying, rows):
            set_gradients(weights_of(each), seed)
        if seed == 1:
            # Gradients in another order are copied, also where only some are.
            for p in weights_of(lying)[:2]:
                p.grad = p.grad.contiguous()
        if seed == 2:
            for each in (lying, rows):
                weights_of(each)[1].grad = None
        for each in (lying, rows):
            each.step()
    assert_same(snapshot(lying), snapshot(rows))
    assert copied(lying) == [False]
    for p in weights_of(lying):
        assert TransposedOrder.of(p) is not None
        for key, state in lying.state[p].items():
            assert key == "step" or lies_like(p, state)


def test_gradients_are_read_where_they_are():
    lying, _ = pair(ORDERS, "stochastic", "cpu")
    set_gradients(weights_of(lying), 0)
    lying.step()
    (launch,) = lying._engine.plan._launches
    assert launch.reads_in_place
    gradients = lying._engine.plan._guard.gradients()
    assert gradients.addresses.tolist() == [p.grad.data_ptr() for p in weights_of(lying)]


@pytest.mark.parametrize("kind", ["schedule_free_adamw", "stable", "momentum"])
def test_rules_of_all_kinds_have_the_bits_of_weights_in_rows(kind):
    lying, rows = pair(ORDERS, "stochastic", "eager", kind)
    for each in (lying, rows):
        take_steps(each, range(3))
        if kind == "schedule_free_adamw":
            each.eval()
            each.train()
            take_steps(each, [3])
    assert_same(snapshot(lying), snapshot(rows))
    assert copied(lying) == [False]


def test_states_in_blocks_stay_in_rows_and_their_weights_are_copied():
    recipe = Recipe("blocks", exp_avg="int8", exp_avg_sq="int8")
    lying = nn.Parameter(torch.randn(64, 64, 3, 3).to(BF16, memory_format=torch.channels_last))
    rows = nn.Parameter(lying.detach().contiguous())
    ours = [make_optimizer("adamw", recipe, "cpu", [("w", each)]) for each in (lying, rows)]
    for each in ours:
        take_steps(each, range(2))
    assert torch.equal(lying, rows)
    assert copied(ours[0]) == [True]
    state = ours[0].state[lying]
    assert all(torch.equal(each, ours[1].state[rows][key]) for key, each in state.items())
    assert state["exp_avg"].is_contiguous()


@pytest.mark.parametrize("kind", [torch_bf16.Muon, torch_bf16.Adafactor])
def test_directions_are_computed_in_rows(kind):
    lying = nn.Parameter(torch.randn(8, 20).to(BF16).t())
    rows = nn.Parameter(lying.detach().contiguous())
    ours = [kind([("w", each)], lr=0.1, recipe="bf16-stochastic") for each in (lying, rows)]
    for each in ours:
        take_steps(each, range(2))
    assert torch.equal(lying, rows)
    assert copied(ours[0]) == [True]


@pytest.mark.parametrize("recipe", ["stochastic", "master"])
def test_a_state_follows_its_weight_into_another_order(recipe):
    """By a checkpoint, and by ``model.to(memory_format=...)`` between two steps."""
    lying, rows = pair(ORDERS, recipe, "cpu")
    for each in (lying, rows):
        take_steps(each, range(2))
    crossed = pair(ORDERS, recipe, "cpu")
    for new, old in zip(crossed, (rows, lying), strict=True):
        with torch.no_grad():
            for p, trained in zip(weights_of(new), weights_of(old), strict=True):
                p.copy_(trained)
        new.load_state_dict(old.state_dict())
    for each in (lying, rows, *crossed):
        take_steps(each, [2])
    for p in weights_of(lying):
        p.data = p.data.contiguous()
    for p, like in zip(weights_of(rows), weights_of(crossed[0]), strict=True):
        p.data = torch.empty_like(like).copy_(p.data)
    for each in (lying, rows, *crossed):
        take_steps(each, [3])
        assert_same(snapshot(each), snapshot(lying))
        for p in weights_of(each):
            assert all(lies_like(p, s) for key, s in each.state[p].items() if key != "step")


@pytest.mark.parametrize(
    "lying",
    [
        torch.zeros(64, 64, 3, 3, dtype=BF16).to(memory_format=torch.channels_last),
        torch.zeros(128, 64, dtype=BF16).t(),
    ],
    ids=["channels_last", "transposed"],
)
def test_moments_in_blocks_are_loaded_into_a_recipe_without_them(lying):
    recipe = Recipe("blocks", exp_avg="int8", exp_avg_sq="int8")
    trained = nn.Parameter(torch.randn(lying.shape).to(BF16))
    saved = make_optimizer("adamw", recipe, "cpu", [("w", trained)])
    take_steps(saved, range(2))
    resumed = []
    for like in (lying, trained):
        weight = nn.Parameter(torch.empty_like(like).copy_(trained.detach()))
        resumed.append(make_optimizer("adamw", "stochastic", "cpu", [("w", weight)]))
        resumed[-1].load_state_dict(saved.state_dict())
        take_steps(resumed[-1], [2])
    assert_same(*map(snapshot, resumed))


@pytest.mark.parametrize("recipe", ["stochastic", "master"])
def test_exact_weights_are_written_where_they_lie(recipe):
    lying, rows = pair(ORDERS, recipe, "cpu")
    for each in (lying, rows):
        take_steps(each, range(2))
        for p in weights_of(each):
            each.set_exact_weight(p, each.exact_weight(p) + 1e-3)
        take_steps(each, [2])
    assert_same(snapshot(lying), snapshot(rows))
    pairs = zip(weights_of(lying), weights_of(rows), strict=True)
    assert all(torch.equal(lying.exact_weight(p), rows.exact_weight(q)) for p, q in pairs)


def test_sums_of_micro_batches_have_the_bits_of_those_in_rows():
    lying = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    rows, ours = copy.deepcopy(lying), []
    lying.to(memory_format=torch.channels_last)
    for model in (lying, rows):
        made = torch_bf16.prepare(model, torch.optim.AdamW(model.parameters()), "bf16-stochastic")
        torch_bf16.accumulate_gradients(*made, "bf16_stochastic")
        ours.append(made)
    for step in range(2):
        gradients = torch.Generator().manual_seed(step)
        for _ in range(3):
            drawn = [torch.randn(p.shape, generator=gradients).to(BF16) for p in rows.parameters()]
            for model, _ in ours:
                # Each parameter gets its gradient from a backward pass, in its own order.
                pairs = zip(model.parameters(), drawn, strict=True)
                sum((p * torch.empty_like(p).copy_(g)).sum() for p, g in pairs).backward()
        for p, q in zip(lying.parameters(), rows.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        assert lying[1].weight.grad.is_contiguous(memory_format=torch.channels_last)
        for _, optimizer in ours:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(lying.parameters(), rows.parameters(), strict=True):
        assert torch.equal(p, q)


def test_sums_of_weights_that_take_turns_are_bound_once(monkeypatch):
    weights = [nn.Parameter(tensor_in("channels_last", seed)) for seed in range(2)]
    optimizer = make_optimizer("sgd", "stochastic", "eager", [*zip("ab", weights, strict=True)])
    torch_bf16.accumulate_gradients(nn.ParameterList(weights), optimizer, "bf16_stochastic")
    made = []
    monkeypatch.setattr(sums, "Batch", lambda *args: made.append(args) or Batch(*args))
    for number in range(8):
        weight = weights[number % 2]
        (weight * torch.ones_like(weight)).sum().backward()
    # One for the first weight, and one for both.
    assert len(made) == 2


def test_orders_that_kernels_cannot_walk():
    rows = torch.zeros(6, 5, 4)
    assert TransposedOrder.of(rows) is None
    assert TransposedOrder.of(rows[:, ::2].transpose(1, 2)) is None
    for dims in ((2, 1, 0), (1, 0, 2)):
        assert TransposedOrder.of(rows.permute(dims)) is None
    for dims, back, size in (((0, 2, 1), (0, 2, 1), (5, 4)), ((1, 2, 0), (2, 0, 1), (6, 20))):
        order = TransposedOrder.of(rows.permute(dims))
        assert order == TransposedOrder(back, *size)
        assert as_it_lies(rows.permute(dims), order).is_contiguous()
    assert TransposedOrder.of(torch.empty(2, 1 << 19, device="meta").t()) is None
    assert TransposedOrder.of(torch.empty(1 << 13, 1 << 19, device="meta").t()) is None


def test_sums_of_all_orders_are_added_in_two_calls(monkeypatch):
    """One for weights in rows, and one for all others."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 2), nn.Conv2d(5, 8, (1, 5)))
    model.to(memory_format=torch.channels_last)
    made = torch_bf16.prepare(model, torch.optim.AdamW(model.parameters()), "bf16-stochastic")
    torch_bf16.accumulate_gradients(*made, "bf16_stochastic")
    calls, run = [], sums.Batch.run_alike
    monkeypatch.setattr(
        sums.Batch, "run_alike", lambda self, *a, **k: (calls.append(len(self)), run(self, *a, **k))
    )
    for _ in range(2):
        sum((p * torch.ones_like(p)).sum() for p in model.parameters()).backward()
    assert sorted(calls) == [3, 3]
