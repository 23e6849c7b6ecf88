"""What keys the noise of a step: names, or places without them, the seed, and the step itself."""

import pytest
import torch
from optimizer_cases import (
    BACKENDS,
    assert_same,
    bits,
    make_optimizer,
    make_parameters,
    set_gradients,
    snapshot,
)

import torch_bf16
from torch_bf16 import errors, get_recipe

STOCHASTIC = [("adamw", backend) for backend in BACKENDS] + [("sgd", "cpu")]
stochastic = pytest.mark.parametrize(("name", "backend"), STOCHASTIC)


@stochastic
def test_named_parameters_have_the_same_bits_in_any_order(name, backend):
    forward = make_parameters()
    backward = dict(reversed(make_parameters().items()))
    one, other = (
        make_optimizer(name, "stochastic", backend, each.items()) for each in (forward, backward)
    )
    for seed in range(3):
        set_gradients(forward.values(), seed)
        for key, p in backward.items():
            p.grad = forward[key].grad.clone()
        one.step()
        other.step()
    in_order = [backward[key] for key in forward]
    assert_same(snapshot(one), snapshot(other, in_order))


@stochastic
def test_without_names_the_position_keys_the_noise(name, backend):
    def run(position, seed=0):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(40, 50).bfloat16()) for _ in range(2)]
        chosen = parameters[position]
        chosen.data.copy_(torch.linspace(1, 2, 2000).view(40, 50))
        recipe = get_recipe("bf16-stochastic", seed=seed)
        optimizer = make_optimizer(name, recipe, backend, parameters)
        for p in parameters:
            p.grad = torch.full_like(p, 0.01)
        optimizer.step()
        return bits(chosen)

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    assert not torch.equal(run(0), run(0, seed=1))


def test_two_steps_draw_apart():
    """The same fp32 result is rounded anew at each step: no draw is used twice."""
    start = torch.full((64, 64), 1.0).bfloat16()
    results = []
    for steps in (1, 2):
        p = torch.nn.Parameter(start.clone())
        optimizer = make_optimizer("sgd", "stochastic", "cpu", [p], lr=1.0, weight_decay=0.0)
        for _ in range(steps):
            p.data.copy_(start)
            # Half a step of bf16 above 1, so that each element goes either way.
            p.grad = torch.full_like(p, -(2.0**-8))
            optimizer.step()
        results.append(p.detach() > 1)
    first, second = results
    n = start.numel()
    # Independent fair draws agree n/2 times with deviation sqrt(n)/2 = 32; five of those.
    assert abs((first == second).sum().item() - n / 2) < 5 * 32
    assert abs(first.sum().item() - n / 2) < 5 * 32


@pytest.fixture
def model(monkeypatch):
    """A cast model with gradients; nothing has been warned of."""
    monkeypatch.setattr(errors, "_said", set())
    layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(5)]
    model = torch_bf16.cast_model(torch.nn.Sequential(*layers))
    set_gradients(model.parameters(), 0)
    return model


def step_each(optimizers):
    for each in optimizers:
        each.step()


def test_an_optimizer_for_each_weight_without_names_is_named_once(model):
    optimizers = [torch_bf16.AdamW([p]) for p in model.parameters()]
    with pytest.warns(UserWarning, match=r"0\.weight, 1\.weight, 2\.weight.*seed 0") as warned:
        step_each([*optimizers, *optimizers])
    assert len(warned) == 1


@pytest.mark.parametrize("seed", [0, 1])
def test_they_are_named_whatever_other_optimizers_there_are(model, seed):
    recipe = torch_bf16.get_recipe("bf16-stochastic", seed=seed)
    others = [torch.nn.Parameter(torch.ones(8, 8).bfloat16()) for _ in range(2)]
    set_gradients(others, 0)
    apart = [torch_bf16.AdamW([p], recipe=recipe) for p in others]
    step_each(apart)
    optimizers = [torch_bf16.AdamW([p]) for p in model.parameters()]
    with pytest.warns(UserWarning, match="draw the same noise"):
        step_each(optimizers)


def test_eight_of_them_are_named_where_the_program_has_cast_the_weights(monkeypatch):
    monkeypatch.setattr(errors, "_said", set())
    weights = [torch.nn.Parameter(torch.ones(8, 8).bfloat16()) for _ in range(8)]
    set_gradients(weights, 0)
    optimizers = [torch_bf16.AdamW([p]) for p in weights]
    step_each(optimizers[:7])
    with pytest.warns(UserWarning, match="at least 8 optimizers with one parameter each have no"):
        step_each(optimizers[7:])


@pytest.mark.parametrize(
    "apart",
    [
        lambda model: [torch_bf16.AdamW([each]) for each in model.named_parameters()],
        lambda model: [
            torch_bf16.AdamW([p], recipe=get_recipe("bf16-stochastic", seed=seed))
            for seed, p in enumerate(model.parameters())
        ],
        lambda model: [
            torch_bf16.AdamW([p], recipe="bf16-fp32-master") for p in model.parameters()
        ],
        lambda model: [torch_bf16.AdamW([p]) for p in [*model.parameters()][:3]],
        lambda model: [torch_bf16.AdamW(model.parameters()) for _ in range(3)],
    ],
    ids=["names", "seeds", "exact", "few", "whole"],
)
def test_optimizers_with_noise_of_their_own_are_not_warned_of(model, apart):
    step_each(apart(model))


def rounds(model, count, make=torch_bf16.AdamW, between=lambda model: None):
    """As in federated averaging: a new optimizer in each round."""
    for number in range(count):
        optimizer = make(model.named_parameters())
        step_each([optimizer, optimizer])
        between(model)
        del optimizer, number


def test_a_fourth_optimizer_that_repeats_the_noise_of_the_first_is_named_once(model):
    match = r"begun at step 0 4 times, .*now an AdamW.* seed 0: .*get_recipe\(recipe, seed=round\)"
    with pytest.warns(UserWarning, match=match) as warned:
        rounds(model, 6)
    assert len(warned) == 1


def test_the_layer_that_is_trained_from_the_start_counts_wherever_it_is(model):
    """Of a model that is unfrozen from its last layer on, with an optimizer for each stage."""
    stages = iter(range(1, 5))

    def of_a_stage(parameters):
        return torch_bf16.AdamW([*parameters][-next(stages) :])

    with pytest.warns(UserWarning, match="begun at step 0 4 times"):
        rounds(model, 4, of_a_stage)


def test_clients_with_seeds_of_their_own_repeat_the_noise_of_their_own_rounds(model):
    """Each begins where the others do, and the next round where the last one of them ended."""

    def trained(seed):
        recipe = get_recipe("bf16-stochastic", seed=seed)
        return torch_bf16.AdamW(model.named_parameters(), recipe=recipe)

    def of_a_round(parameters):
        begun = {name: each.clone() for name, each in model.state_dict().items()}
        for seed in range(2):
            model.load_state_dict(begun)
            step_each([trained(seed)])
        return trained(2)

    with pytest.warns(UserWarning, match="begun at step 0 4 times, .* with seed 0"):
        rounds(model, 4, of_a_round)


def test_tensors_that_were_stepped_can_be_swapped(model):
    step_each([torch_bf16.AdamW(model.named_parameters())])
    weight = next(model.parameters())
    weight.grad = None
    torch.utils.swap_tensors(weight, torch.nn.Parameter(weight.detach().float()))
    assert weight.dtype == torch.float32


def test_a_reset_of_the_state_repeats_the_noise_too(model):
    optimizer = torch_bf16.AdamW(model.named_parameters())
    with pytest.warns(UserWarning, match="noise is the same each time"):
        rounds(model, 4, lambda parameters: optimizer, lambda model: optimizer.state.clear())


def test_optimizers_that_go_on_counting_or_draw_apart_or_begin_anew_are_not_named(model):
    seeds = iter(range(8))

    def seeded(parameters):
        return torch_bf16.AdamW(parameters, recipe=get_recipe("bf16-stochastic", seed=next(seeds)))

    def loaded(parameters):
        optimizer = torch_bf16.AdamW(parameters)
        optimizer.load_state_dict(state)
        return optimizer

    def make_anew(model):
        for each in model:
            each.reset_parameters()

    rounds(model, 6, seeded)
    rounds(model, 6, between=make_anew)
    begun = {name: each.clone() for name, each in model.state_dict().items()}
    rounds(model, 6, between=lambda model: model.load_state_dict(begun))
    for _ in range(3):  # two stages of a sweep
        model.load_state_dict(begun)
        rounds(model, 2)
    for number in range(6):  # two stages of a sweep with a seed for each
        model.load_state_dict(begun)
        for seed in range(2):
            recipe = get_recipe("bf16-stochastic", seed=seed)
            rounds(model, 1, lambda p, r=recipe, n=number: torch_bf16.AdamW(p, 1e-3 * n, recipe=r))
    for number in range(6):  # a lottery ticket
        model.load_state_dict(begun)
        with torch.no_grad():
            for p in model.parameters():
                p.view(-1)[: 2 * number] = 0
        rounds(model, 1)
    first = torch_bf16.AdamW(model.named_parameters())
    first.step()
    state = first.state_dict()
    rounds(model, 6, loaded)
