"""The ladder of small updates, decay alone, and a falling second moment, for every format.

Bounds are those of ``test_retention.py`` with the format's own spacing. Codes in blocks are rounded
anew at every step, because the scale moves: each step adds a variance of at most a quarter of a
gap's square, whatever the number moved by.
"""

import math

import pytest
import torch
from test_retention import FP32, NEAREST, SIGMAS, STEPS, N, bound_of_one, weights
from torch import nn

import torch_bf16
from torch_bf16 import Recipe
from torch_bf16.formats import UINT8

# Spacing of the numbers between 1 and 2.
SPACING = {
    "bf16_stochastic": 2.0**-7,
    "bf16+8": 2.0**-15,
    "bf16+16": 2.0**-23,
    "bf16+fp32": 2.0**-23,
}
every_weight = pytest.mark.parametrize("name", SPACING)


def number(optimizer, parameter):
    """The weights as the next step reads them, fp64."""
    format_ = optimizer.recipe.format_of("weights", parameter.shape, parameter.dtype)
    state = optimizer.state[parameter]
    planes = [parameter.detach(), *(state[key] for key in format_.plane_names("")[1:])]
    return format_.decode(planes).double()


def trained(recipe, make, gradient, steps=STEPS):
    parameter = nn.Parameter(weights())
    optimizer = make([parameter], recipe)
    parameter.grad = gradient(parameter)
    for _ in range(steps):
        optimizer.step()
    return number(optimizer, parameter)


def mean_bound(distance, spacing):
    return SIGMAS * bound_of_one(distance, spacing) / math.sqrt(N) + STEPS * FP32


def grown(recipe, relative):
    found = trained(
        recipe,
        lambda params, recipe: torch_bf16.SGD(params, lr=relative, recipe=recipe),
        lambda parameter: -weights(),
    )
    return found - weights().double() * (1 + STEPS * relative)


@pytest.mark.parametrize("relative", [1e-3, 1e-4, 1e-5, 1e-6])
@every_weight
def test_a_thousand_equal_steps_lead_where_they_should(name, relative):
    # At 1e-3 weights double, to below 4, where spacings double once.
    spacing = SPACING[name] * (2 if relative == 1e-3 else 1)
    deviation = grown(Recipe("ladder", weights=name), relative)
    assert deviation.mean().abs() <= mean_bound(1.5 * relative * STEPS, spacing)
    assert deviation.std() <= bound_of_one(1.5 * relative * STEPS, spacing) + STEPS * FP32


@pytest.mark.parametrize("relative", [1e-3, 1e-4, 1e-5, 1e-6])
def test_control_weights_rounded_to_nearest_do_not_take_one_of_them(relative):
    deviation = grown(NEAREST, relative)
    expected = weights().double() * STEPS * relative
    assert torch.equal(-deviation, weights().double() * (1 + STEPS * relative) - weights().double())
    assert deviation.mean().abs() > 0.99 * expected.mean()
    assert deviation.mean().abs() > mean_bound(1.5 * relative * STEPS, 2.0**-7)


def decayed(recipe, rate):
    return trained(
        recipe,
        lambda params, recipe: torch_bf16.AdamW(
            params, lr=10 * rate, weight_decay=0.1, recipe=recipe
        ),
        torch.zeros_like,
    )


@pytest.mark.parametrize("rate", [1e-4, 1e-5, 1e-6])
@every_weight
def test_decay_alone_acts(name, rate):
    deviation = (
        decayed(Recipe("decay", weights=name), rate) - weights().double() * (1 - rate) ** STEPS
    )
    assert deviation.mean().abs() <= mean_bound(1.5 * rate * STEPS, SPACING[name])


@every_weight
def test_decay_of_a_ten_millionth_acts_as_well_as_fp32_holds_it(name):
    """1 - 1e-7 is a fifth off in fp32, and the product is rounded once more."""
    moved = (weights().double() - decayed(Recipe("decay", weights=name), 1e-7)).mean()
    assert 0.5 < moved / (weights().double().mean() * STEPS * 1e-7) < 1.5


def test_control_decay_of_weights_rounded_to_nearest_does_nothing():
    assert torch.equal(decayed(NEAREST, 1e-5), weights().double())


def fallen(recipe, beta2, steps):
    """From v = 1 with gradients of 0.1: v and where it should be, after ``steps``."""
    parameter = nn.Parameter(weights())
    optimizer = torch_bf16.AdamW([parameter], lr=0.0, betas=(0.9, beta2), recipe=recipe)
    gradient = torch.tensor(0.1).bfloat16()
    parameter.grad = torch.full_like(parameter, gradient.item())
    optimizer.step()
    state = optimizer.state[parameter]
    blocked = state["exp_avg_sq"].dtype == torch.uint8
    state["exp_avg_sq"].fill_(255 if blocked else 1.0)
    if blocked:
        state["exp_avg_sq_scale"].fill_(1.0)
    for _ in range(steps):
        optimizer.step()
    planes = state["exp_avg_sq"], state.get("exp_avg_sq_scale")
    target = gradient.double().item() ** 2
    found = UINT8.decode(planes) if blocked else planes[0]
    return found.double(), target + (1 - target) * beta2**steps


@pytest.mark.parametrize("beta2", [0.95, 0.99, 0.999])
@pytest.mark.parametrize("name", ["fp32", "bf16_stochastic", "int8"])
def test_a_second_moment_follows_when_gradients_fall_tenfold(name, beta2):
    steps = round(3 / (1 - beta2))
    moment, true = fallen(Recipe("fall", exp_avg_sq=name), beta2, steps)
    # Of each step's noise, beta2 to the power of the steps since is left.
    kept = sum(beta2 ** (2 * back) for back in range(steps))
    gap = {"fp32": 2.0**-24, "bf16_stochastic": 2.0**-8, "int8": 511 / 255**2}[name]
    bound = SIGMAS * gap / 2 * math.sqrt(kept / N) + steps * 3 * 2.0**-24
    if name == "int8":
        bound += gap * 2.0**-15 / (1 - beta2)
    assert abs(moment.mean().item() - true) <= bound
    assert bound < 0.15 * true


@pytest.mark.parametrize("beta2", [0.99, 0.999])
def test_control_a_second_moment_rounded_to_nearest_does_not_follow(beta2):
    moment, true = fallen(NEAREST, beta2, round(3 / (1 - beta2)))
    assert moment.mean().item() > 1.15 * true
