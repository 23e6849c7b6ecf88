"""On fp32 parameters, where nothing is compressed, ours are the optimizers of ``torch.optim``."""

import warnings
from itertools import cycle, product

import pytest
import torch
from optimizer_cases import (
    OPTIMIZERS,
    RECIPES,
    assert_same,
    backend_of,
    make_optimizer,
    make_parameters,
    set_gradients,
    snapshot,
    take_steps,
)
from torch import nn
from torch.optim import lr_scheduler

import torch_bf16

STEPS = 24
EPSILON = 2.0**-24  # half a step of fp32 at 1

# name of the optimizer, options, and those whose absence the comparison must notice
ADAM = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.0}
SGD = {"lr": 0.05}
MOMENTUM = {"lr": 0.05, "momentum": 0.9}
TENSOR_BETAS = {"betas": (torch.tensor(0.7), torch.tensor(0.9))}
COMPARISONS = [
    *((name, ADAM, option) for name in ("adamw", "adam") for option in (
        {"weight_decay": 0.3}, {"maximize": True}, {"betas": (0.5, 0.999)}, {"betas": (0.0, 0.0)},
        {"eps": 0.1}, {"lr": torch.tensor(0.03)}, TENSOR_BETAS, {"foreach": True},
    )),
    ("adam", {**ADAM, "weight_decay": 0.3}, {"decoupled_weight_decay": True}),
    *(("sgd", SGD, option) for option in (
        {"weight_decay": 0.3}, {"maximize": True}, {"momentum": 0.9}, {"lr": torch.tensor(0.1)},
        {"weight_decay": torch.tensor(0.3)}, {"fused": True},
    )),
    *(("momentum", MOMENTUM, option) for option in (
        {"dampening": 0.5}, {"nesterov": True}, {"maximize": True}, {"weight_decay": 0.3},
    )),
    ("momentum", {**MOMENTUM, "weight_decay": 0.1}, {"dampening": 0.5, "maximize": True}),
    ("momentum", {**MOMENTUM, "weight_decay": 0.1}, {"nesterov": True, "maximize": True}),
    *((name, ADAM, {"amsgrad": True}) for name in ("adamw", "adam")),
    ("adamw", {**ADAM, "amsgrad": True}, {"maximize": True}),
    *((name, {**ADAM, "eps": 1e-8}, option) for name in ("nadam", "radam") for option in (
        {"weight_decay": 0.3}, {"weight_decay": 0.3, "decoupled_weight_decay": True},
        {"maximize": True}, {"betas": (0.0, 0.9)}, {"eps": 0.1}, {"lr": torch.tensor(0.03)},
    )),
    ("nadam", ADAM, {"momentum_decay": 5.0}),
    ("nadam", {**ADAM, "momentum_decay": 5.0}, {"momentum_decay": 0.0}),
    *(("adagrad", {"lr": 0.05}, option) for option in (
        {"weight_decay": 0.3}, {"lr_decay": 0.3}, {"initial_accumulator_value": 0.5},
        {"maximize": True}, {"eps": 0.1}, {"lr": torch.tensor(0.1)}, {"foreach": True},
    )),
    *(("rmsprop", {"lr": 0.01, "weight_decay": 0.0}, option) for option in (
        {"weight_decay": 0.3}, {"alpha": 0.5}, {"momentum": 0.9}, {"centered": True},
        {"centered": True, "momentum": 0.9}, {"maximize": True}, {"eps": 0.1},
        {"lr": torch.tensor(0.03)},
    )),
]  # fmt: skip
WITHOUT_EFFECT = {"foreach", "fused"}


def id_of(value):
    if isinstance(value, tuple):
        return "-".join(f"{v:g}" for v in map(float, value))
    return f"{float(value):g}" if isinstance(value, torch.Tensor | float) else str(value)


def ids(case):
    name, _, option = case
    parts = [name]
    for key, value in option.items():
        kind = "tensor-" if "tensor" in repr(value) else ""
        parts.append(f"{kind}{key}-{id_of(value)}")
    return "-".join(parts)


def fp32_parameters():
    return {key: nn.Parameter(p.detach().float()) for key, p in make_parameters().items()}


def tensors(state):
    return [state[key] for key in state.keys() - {"step", "mu_product"}]


def run(optimizer, parameters):
    for seed in range(STEPS):
        set_gradients(parameters, seed)
        for parameter in parameters:
            # They fall tenfold halfway, so that a maximum and a sum of the past count.
            parameter.grad.mul_(1.0 if seed < STEPS // 2 else 0.1)
        optimizer.step()


# Both backends have the oracle's bits for every rule, and options are the host's.
@pytest.mark.parametrize(
    ("case", "backend"),
    [(case, backend_of(case[0])) for case in COMPARISONS],
    ids=lambda x: x if isinstance(x, str) else ids(x),
)
def test_weights_and_states_are_torchs_own_for_every_option(case, backend):
    name, base, option = case
    ours, theirs, _ = OPTIMIZERS[name]
    parameters = [list(fp32_parameters().values()) for _ in range(3)]
    mine = ours(parameters[0], **{**base, **option}, recipe="bf16-stochastic", backend=backend)
    reference = theirs(parameters[1], **{**base, **option})
    control = theirs(parameters[2], **base)
    for optimizer, its in zip((mine, reference, control), parameters, strict=True):
        run(optimizer, its)
    # Each step rounds a weight at most three times on either side, and its update is a tenth of the
    # weight or less and carries at most ten roundings more: 8 half steps of fp32 per step, at the
    # largest magnitude there is. States take as few operations per step, and forget.
    numbers = [*parameters[1], *(t for state in reference.state.values() for t in tensors(state))]
    largest = max(t.detach().abs().max().item() for t in numbers if t.numel())
    tolerance = STEPS * 8 * EPSILON * max(largest, 1.0)
    noticed = False
    for p, q, r in zip(*parameters, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=tolerance)
        noticed |= bool(((p - r).abs() > 10 * tolerance).any())
        for key in reference.state[q].keys() - {"step", "mu_product"}:
            state, its = mine.state[p][key], reference.state[q][key]
            torch.testing.assert_close(state, its, rtol=0, atol=tolerance)
        assert mine.state[p].keys() >= reference.state[q].keys() - {"mu_product"}
    assert noticed != bool(WITHOUT_EFFECT & option.keys())


# kind -> scheduler of an optimizer; each changes lr (or momentum) within eight steps
SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8, power=2.0),
}


def test_every_scheduler_of_torch_is_in_the_table():
    assert set(lr_scheduler.__all__) - {"LRScheduler"} == set(SCHEDULERS)


# The recipes take turns: a rate is made one of a step's scalars before a format is looked at.
@pytest.mark.parametrize(
    ("kind", "lr", "name", "recipe"),
    [
        (*steered, recipe)
        for steered, recipe in zip(
            product(SCHEDULERS, (0.05, torch.tensor(0.05)), ("adamw", "momentum")), cycle(RECIPES)
        )
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__.lower(),
)
def test_every_scheduler_steers_as_it_steers_torchs_optimizer(kind, lr, name, recipe):
    def copy_of(lr):
        return lr.clone() if isinstance(lr, torch.Tensor) else lr

    scheduled, by_hand = (
        make_optimizer(name, recipe, "cpu", make_parameters().items(), lr=copy_of(lr))
        for _ in range(2)
    )
    unused = [nn.Parameter(torch.zeros(1))]
    options = {k: v for k, v in scheduled.defaults.items() if k in ("momentum", "betas")}
    leader = OPTIMIZERS[name][1](unused, lr=copy_of(lr), **options)
    schedulers = [SCHEDULERS[kind](scheduled), SCHEDULERS[kind](leader)]
    rates = set()
    for seed in range(8):
        for key in ("lr", *options):
            value = leader.param_groups[0][key]
            by_hand.param_groups[0][key] = copy_of(value)
        rates.add(float(leader.param_groups[0]["lr"]))
        take_steps(scheduled, [seed])
        take_steps(by_hand, [seed])
        leader.step()
        for scheduler in schedulers:
            scheduler.step(*((1.0,) if kind == "ReduceLROnPlateau" else ()))
        # Older torch makes a number of a tensor here and there; so does it for its own.
        its = leader.param_groups[0]["lr"]
        assert isinstance(scheduled.param_groups[0]["lr"], type(its))
    assert len(rates) > 1
    assert_same(snapshot(scheduled), snapshot(by_hand))


def test_a_scheduler_that_steps_first_is_told_so_and_one_that_steps_second_is_not():
    optimizer = make_optimizer("adamw", "stochastic", "cpu", make_parameters().values())
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        scheduler.step()
    optimizer = make_optimizer("adamw", "stochastic", "cpu", make_parameters().values())
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_steps(optimizer, [1])
        scheduler.step()


def test_states_of_adagrad_are_not_shared_with_other_processes():
    optimizer = torch_bf16.Adagrad([nn.Parameter(torch.ones(3))])
    with pytest.raises(NotImplementedError, match=r"share_memory\(\) .* not supported .* with DDP"):
        optimizer.share_memory()
