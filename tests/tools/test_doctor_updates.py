"""The update that ``doctor`` expects of an optimizer's state, beside the one that was taken."""

import pytest
import torch
from doctored import doctor
from torch import nn

import torch_bf16

_OURS = {"lr": 1e-3, "recipe": "bf16-fp32-master"}
KNOWN = {
    "torch.Adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1),
    "torch.AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "torch.AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "torch.NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "torch.RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "torch.SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "torch.RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "AdamW": lambda p: torch_bf16.AdamW(p, **_OURS),
    "NAdam": lambda p: torch_bf16.NAdam(p, **_OURS),
    "RAdam": lambda p: torch_bf16.RAdam(p, **_OURS),
    "ADOPT": lambda p: torch_bf16.ADOPT(p, **_OURS),
    "Lion": lambda p: torch_bf16.Lion(p, **_OURS),
    "SGD": lambda p: torch_bf16.SGD(p, momentum=0.9, **_OURS),
    "RMSprop": lambda p: torch_bf16.RMSprop(p, momentum=0.9, **_OURS),
}


def gradient(step, shape=(64, 64)):
    """Nearly the same in each step, so that the next one is known from their mean."""
    generator = torch.Generator().manual_seed(0)
    mean = 1e-3 * torch.randn(shape, generator=generator)
    return mean + 1e-5 * torch.randn(shape, generator=generator.manual_seed(step))


def trained(make, steps, dtype=torch.float32):
    parameter = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))
    parameter.data = parameter.data.to(dtype)
    optimizer = make([("w", parameter)])
    for step in range(steps):
        parameter.grad = gradient(step).to(dtype)
        optimizer.step()
    return parameter, optimizer


def expected(tmp_path, weight, state_dict):
    """The root mean square of the update that the doctor expects; None if it is not judged."""
    content = {"model": {"w": weight.detach()}, "optimizer": state_dict}
    torch.save(content, tmp_path / "run.pt")
    _, found = doctor(tmp_path / "run.pt", tmp_path / "found.json")
    return found["weights"][0]["update"]


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("steps", [2, 40])
def test_the_expected_update_is_the_one_that_is_taken_next(name, steps, tmp_path):
    dtype = torch.float32 if name.startswith("torch.") else torch.bfloat16
    parameter, optimizer = trained(KNOWN[name], steps, dtype)

    def exact():
        return (
            parameter.detach().clone() if dtype.itemsize == 4 else optimizer.exact_weight(parameter)
        )

    found = expected(tmp_path, parameter, optimizer.state_dict())
    before = exact()
    parameter.grad = gradient(steps).to(dtype)
    optimizer.step()
    taken = float((exact() - before).square().mean().sqrt())
    # At the second step momentum has grown by half since the state was saved.
    rel = {2: 0.5, 40: 0.05}[steps]
    assert found == pytest.approx(taken, rel=rel)


def of_another_library(steps=40, shape=(64, 64), group=None, **more):
    """A state dict of AdamW with the options and the states of another library's class."""
    _, optimizer = trained(KNOWN["torch.AdamW"], steps)
    found = optimizer.state_dict()
    (state,) = found["state"].values()
    state.update(more)
    found["param_groups"][0].update(group or {})
    return found


def test_steps_may_be_counted_by_group(tmp_path):
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    whole = expected(tmp_path, weight, of_another_library())
    states = of_another_library(group={"step": 40})
    del states["state"][0]["step"]
    assert expected(tmp_path, weight, states) == pytest.approx(whole)


@pytest.mark.parametrize("corrects", [False, True, None])
def test_prodigy_scales_its_learning_rate(corrects, tmp_path):
    """Its moments are those of ``d * g``; it keeps flattened tensors, too.

    They are corrected for their start only on request, for which some classes have no option.
    """
    weight = torch.zeros(64, 64)
    plain = expected(tmp_path, weight, of_another_library(group={"weight_decay": 0.0}))
    options = {"lr": 1.0, "d": 2e-3, "d_coef": 1.0}
    if corrects is not None:
        options["use_bias_correction"] = corrects
    flat = torch.zeros(64 * 64)
    states = of_another_library(group={**options, "weight_decay": 0.0}, s=flat, p0=flat)
    bias = 1.0 if corrects else (1 - 0.9**40) / (1 - 0.999**40) ** 0.5
    assert expected(tmp_path, weight, states) == pytest.approx(plain * 2 * bias, rel=1e-3)


NOT_ADAMS = {
    "LAMB": ({"grad_averaging": True}, {}),
    "AdamP": ({"wd_ratio": 0.1}, {}),
    "D-Adaptation": ({"d": 1e-3}, {}),  # whose first moment includes lr
    "AvaGrad": ({"gamma": 0.1}, {}),
    "AdEMAMix": ({}, {"exp_avg_slow": torch.ones(64, 64)}),
    "SOAP": ({}, {"Q": [torch.eye(64), torch.eye(64)]}),
    # Their first moment is one of gradients that are already divided; LaProp's includes lr, too.
    "LaProp": ({}, {"exp_avg_lr_1": 1e-3, "exp_avg_lr_2": 1.0}),
    "ADOPT of pytorch_optimizer": ({}, {"exp_avg": torch.ones(64, 64)}),
}


@pytest.mark.parametrize("name", NOT_ADAMS)
def test_what_is_not_adam_s_is_not_judged_as_adam(name, tmp_path):
    group, more = NOT_ADAMS[name]
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    assert expected(tmp_path, weight, of_another_library()) is not None
    assert expected(tmp_path, weight, of_another_library(group=group, **more)) is None


def test_a_weight_without_dimensions_is_judged_as_one_of_a_single_number(tmp_path):
    found = []
    for shape in ((), (1,)):
        parameter = nn.Parameter(torch.ones(shape))
        optimizer = torch.optim.AdamW([("w", parameter)], lr=1e-3)
        parameter.grad = torch.ones(shape)
        optimizer.step()
        found.append(expected(tmp_path, parameter, optimizer.state_dict()))
    assert found[0] == found[1] == pytest.approx(1e-3, rel=0.05)


def test_a_single_number_beside_the_moments_of_a_single_weight_is_unknown_too(tmp_path):
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([("w", parameter)], lr=1e-3)
    parameter.grad = torch.ones(1)
    optimizer.step()
    saved = optimizer.state_dict()
    assert expected(tmp_path, parameter, saved) is not None
    saved["state"][0]["previous_grad"] = torch.ones(1)  # as DiffGrad's
    assert expected(tmp_path, parameter, saved) is None


@pytest.mark.parametrize("has_lr", [False, True])
def test_a_buffer_that_includes_the_learning_rate_is_not_judged(has_lr, tmp_path):
    _, optimizer = trained(KNOWN["torch.RMSprop"], 3)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr_in_momentum"] = has_lr  # timm's RMSpropTF
    found = expected(tmp_path, torch.ones(64, 64), saved)
    assert (found is None) == has_lr


def test_a_stalled_run_of_adopt_is_not_cleared(tmp_path):
    """Its updates, taken for Adam's, seemed hundreds of times as large."""
    recipe = torch_bf16.Recipe(weights="bf16_nearest", exp_avg="bf16_nearest")
    make = lambda p: torch_bf16.ADOPT(p, lr=1e-5, recipe=recipe)  # noqa: E731
    parameter, optimizer = trained(make, 20, torch.bfloat16)
    content = {"model": {"w": parameter.detach()}, "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "run.pt")
    status, found = doctor(tmp_path / "run.pt", tmp_path / "found.json")
    assert (status, found["healthy"]) == (1, False)
