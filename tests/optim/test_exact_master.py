"""An exact master is an fp32 optimizer: bit for bit, over 10,000 steps."""

import numpy as np
import oracle
import pytest
import torch
from optimizer_cases import OPTIMIZERS, bits
from torch import nn

import torch_bf16
from torch_bf16.numerics.rounding import bf16_nearest, join16

STEPS = 10_000
HYPER = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
BF16_PLUS_16 = torch_bf16.get_recipe("bf16-fp32-master")
BF16_PLUS_FP32 = torch_bf16.get_recipe(BF16_PLUS_16, weights="bf16+fp32")
NEAREST = torch_bf16.Recipe("control", "bf16_nearest", "fp32", "fp32")


def schedule(step):
    """Warm-up and a cosine's descent to a hundredth, so that the last updates are tiny."""
    warm = min(1.0, (step + 1) / 100)
    return 3e-3 * warm * (0.01 + 0.99 * (1 + np.cos(np.pi * step / STEPS)) / 2)


def initial_layer():
    torch.manual_seed(0)
    return nn.Linear(5, 7)


def all_gradients(steps, shape, seed=0):
    """bf16 gradients that shrink a thousandfold, with zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(0, -3, steps).view(-1, *[1] * len(shape))
    gradients = torch.randn(steps, *shape, generator=generator) * sizes
    keep = torch.rand(gradients.shape, generator=generator) > 0.1
    return (gradients * keep).bfloat16()


def train(optimizer, parameter, gradients):
    for step, gradient in enumerate(gradients):
        optimizer.param_groups[0]["lr"] = schedule(step)
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def cast_and_train(recipe, gradients, optimizer="adamw", backend="cpu", **options):
    weight = torch_bf16.cast_model(initial_layer(), recipe).weight
    assert weight.dtype == torch.bfloat16
    optimizer = OPTIMIZERS[optimizer][0]([weight], recipe=recipe, **options, backend=backend)
    train(optimizer, weight, gradients)
    return weight.detach(), optimizer.state[weight]


@pytest.fixture(scope="module")
def gradients():
    return all_gradients(STEPS, (7, 5))


@pytest.fixture(scope="module")
def trained(gradients):
    """(weight, state) of remainder16 with fp32 moments after all steps."""
    return cast_and_train("bf16-fp32-master", gradients, **HYPER)


def test_ten_thousand_steps_equal_the_oracles_fp32_adamw(gradients, trained):
    planes = {
        "weight": (initial_layer().weight.detach().numpy().copy(),),
        "exp_avg": (np.zeros((7, 5), np.float32),),
        "exp_avg_sq": (np.zeros((7, 5), np.float32),),
    }
    formats = dict.fromkeys(planes, "fp32")
    as_fp32 = gradients.float().numpy()
    for step in range(STEPS):
        planes = oracle.optimizer_step(
            "adamw", formats, planes, as_fp32[step], {**HYPER, "lr": schedule(step)},
            seed=0, name="none", step=step + 1,
        )  # fmt: skip
    weight, state = trained
    expected = {role: torch.from_numpy(plane) for role, (plane,) in planes.items()}
    assert torch.equal(bits(join16(weight, state["remainder16"])), bits(expected["weight"]))
    assert torch.equal(bits(state["exp_avg"]), bits(expected["exp_avg"]))
    assert torch.equal(bits(state["exp_avg_sq"]), bits(expected["exp_avg_sq"]))


def test_ten_thousand_steps_equal_our_own_optimizer_on_fp32_parameters(gradients, trained):
    parameter = initial_layer().weight
    optimizer = torch_bf16.AdamW([parameter], **HYPER)
    train(optimizer, parameter, gradients)
    weight, state = trained
    assert parameter.dtype == torch.float32
    assert optimizer.state[parameter]["step"].item() == state["step"].item() == STEPS
    assert torch.equal(bits(join16(weight, state["remainder16"])), bits(parameter))
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(bits(state[key]), bits(optimizer.state[parameter][key]))


def test_the_visible_weight_is_the_master_rounded_to_nearest(trained):
    weight, state = trained
    master = join16(weight, state["remainder16"])
    # Ties go away from zero here and to even in bf16_nearest: nothing else may differ.
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(bits(weight)[~tie], bits(bf16_nearest(master))[~tie])
    assert (state["remainder16"] != 0).float().mean() > 0.9


def test_control_weights_rounded_to_nearest_end_elsewhere(gradients, trained):
    weight, _ = cast_and_train(NEAREST, gradients, **HYPER)
    different = (bits(weight) != bits(trained[0])).float().mean().item()
    assert different > 0.5


@pytest.mark.parametrize(
    ("name", "backend"),
    # What the CPU backend compiles for a format is the same for all rules.
    [*((name, "eager") for name in OPTIMIZERS), ("adamw", "cpu"), ("cautious", "cpu")],
)
def test_the_two_exact_formats_hold_the_same_master(name, backend):
    options = {key: value for key, value in OPTIMIZERS[name][2].items() if key != "lr"}
    gradients = all_gradients(30, (7, 5), seed=1)
    (halves, one), (visible, other) = (
        cast_and_train(recipe, gradients, name, backend, **options)
        for recipe in (BF16_PLUS_16, BF16_PLUS_FP32)
    )
    assert torch.equal(bits(join16(halves, one["remainder16"])), bits(other["master"]))
    assert torch.equal(bits(visible), bits(bf16_nearest(other["master"])))
    for key in one.keys() - {"remainder16"}:
        assert torch.equal(bits(one[key]), bits(other[key])), key
