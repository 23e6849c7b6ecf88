"""Updates far below a step of bf16 must add up. A control rounded to nearest stands beside each
test and must fail it.

The bounds. A weight on the bf16 grid that should move by d, at most one step ``ulp``, is rounded
to one of two neighbours without bias, with a variance of at most |d| * ulp. Rounding errors of
different steps are uncorrelated, so after all steps the deviation of one weight from its true place
has a variance of at most sum(|d|) * ulp, and the mean over N weights, whose draws are independent,
has 1/N of that. Means must be within five standard deviations, which chance exceeds once in two
million; what fp32 itself rounds per step comes on top.
"""

import math

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16.numerics.rounding import join16

N = 65_536
STEPS = 1000
SIGMAS = 5
FP32 = 2.0**-23  # half a step of fp32 below 4
NEAREST = torch_bf16.Recipe("control", "bf16_nearest", "bf16_nearest", "bf16_nearest")

every_relative_update = pytest.mark.parametrize("relative", [1e-3, 1e-4, 1e-5])


def weights():
    """N weights from 1 to 1.5, on the bf16 grid."""
    uniform = torch.rand(256, 256, generator=torch.Generator().manual_seed(0))
    return (1 + uniform / 2).bfloat16().clamp(max=1.5)


def grow(recipe, relative):
    """Adds ``relative`` of the first weight, STEPS times; returns the parameter and its state."""
    parameter = nn.Parameter(weights())
    optimizer = torch_bf16.SGD([parameter], lr=relative, recipe=recipe)
    parameter.grad = -weights()
    for _ in range(STEPS):
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


def true_place(relative):
    return weights().double() * (1 + STEPS * relative)


def bound_of_one(distance, ulp):
    return math.sqrt(distance * ulp)


def growth_bounds(relative):
    """For one weight: standard deviation. For the mean of all: the largest deviation allowed."""
    # At 1e-3 weights double, to below 4, where a step is 2**-6; else they stay below 2.
    ulp = 2.0**-6 if relative == 1e-3 else 2.0**-7
    sigma = bound_of_one(1.5 * relative * STEPS, ulp)
    return sigma, SIGMAS * sigma / math.sqrt(N) + STEPS * FP32


@every_relative_update
def test_an_exact_master_is_off_by_nothing_but_roundings_of_fp32(relative):
    parameter, state = grow("bf16-fp32-master", relative)
    master = join16(parameter, state["remainder16"]).double()
    assert (master - true_place(relative)).abs().max() <= 2 * STEPS * FP32
    assert 0.03 * relative > 2 * FP32


@every_relative_update
def test_stochastic_weights_arrive_where_the_updates_lead(relative):
    parameter, _ = grow("bf16-stochastic", relative)
    deviation = parameter.double() - true_place(relative)
    sigma, bound = growth_bounds(relative)
    assert deviation.mean().abs() <= bound
    # Draws that repeat from step to step would leave the mean as it is and spread the weights.
    assert deviation.std() <= sigma


@every_relative_update
def test_control_weights_rounded_to_nearest_do_not_move(relative):
    parameter, _ = grow(NEAREST, relative)
    assert torch.equal(parameter, weights())
    deviation = parameter.double() - true_place(relative)
    assert deviation.mean().abs() > 10 * growth_bounds(relative)[1]


def decay(recipe, rate):
    """AdamW's decay alone: 0.1 times a learning rate, and a gradient of zero."""
    parameter = nn.Parameter(weights())
    optimizer = torch_bf16.AdamW([parameter], lr=10 * rate, weight_decay=0.1, recipe=recipe)
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(STEPS):
        optimizer.step()
    deviation = parameter.detach().double() - weights().double() * (1 - rate) ** STEPS
    # Errors shrink with the weights, so that a sum of variances bounds them all the same.
    bound = SIGMAS * bound_of_one(1.5 * rate * STEPS, 2.0**-7) / math.sqrt(N) + STEPS * FP32
    return parameter.detach(), deviation.mean().abs().item(), bound


@pytest.mark.parametrize("rate", [1e-4, 1e-5])
def test_weight_decay_acts_below_a_step_of_bf16(rate):
    _, deviation, bound = decay("bf16-stochastic", rate)
    assert deviation <= bound


@pytest.mark.parametrize("rate", [1e-4, 1e-5])
def test_control_weight_decay_of_weights_rounded_to_nearest_does_nothing(rate):
    parameter, deviation, bound = decay(NEAREST, rate)
    assert torch.equal(parameter, weights())
    assert deviation > 10 * bound


FALLEN_STEPS = 3000


def second_moment_after_a_fall(recipe):
    """From v = 1, gradients of 0.1; returns v and its true value after FALLEN_STEPS."""
    parameter = nn.Parameter(weights())
    optimizer = torch_bf16.AdamW([parameter], lr=0.0, betas=(0.9, 0.999), recipe=recipe)
    gradient = torch.tensor(0.1).bfloat16()
    parameter.grad = torch.full_like(parameter, gradient.item())
    optimizer.step()
    moment = optimizer.state[parameter]["exp_avg_sq"].fill_(1.0)
    for _ in range(FALLEN_STEPS):
        optimizer.step()
    target = gradient.double().item() ** 2
    return moment.double(), target + (1 - target) * 0.999**FALLEN_STEPS


def bound_of_second_moment():
    # It falls by less than 1, and near its target goes by at most 2 * 0.001 * 0.01 a step either
    # way. A step is 2**-8 below 1. fp32 rounds three times per step.
    distance = 1 + FALLEN_STEPS * 2e-5
    return SIGMAS * bound_of_one(distance, 2.0**-8) / math.sqrt(N) + FALLEN_STEPS * 3 * 2.0**-24


def test_a_stochastic_second_moment_follows_when_gradients_fall_tenfold():
    moment, true = second_moment_after_a_fall("bf16-stochastic")
    assert true < 0.07
    assert abs(moment.mean().item() - true) <= bound_of_second_moment()
    assert bound_of_second_moment() < 0.05 * true


def test_control_a_second_moment_rounded_to_nearest_never_falls():
    moment, true = second_moment_after_a_fall(NEAREST)
    assert (moment == 1.0).all()
    assert moment.mean().item() - true > 10 * bound_of_second_moment()
