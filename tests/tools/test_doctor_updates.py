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
    "torch.SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "torch.RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "AdamW": lambda p: torch_bf16.AdamW(p, **_OURS),
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


def of_another_library(group=None, **more):
    """A state dict of AdamW with the options and the states of another library's class."""
    _, optimizer = trained(KNOWN["torch.AdamW"], 40)
    found = optimizer.state_dict()
    (state,) = found["state"].values()
    state.update(more)
    found["param_groups"][0].update(group or {})
    return found


NOT_ADAMS = {
    "LAMB": ({"grad_averaging": True}, {}),
    "D-Adaptation": ({"d": 1e-3}, {}),  # whose first moment includes lr
    "AdEMAMix": ({}, {"exp_avg_slow": torch.ones(64, 64)}),
    "SOAP": ({}, {"Q": [torch.eye(64), torch.eye(64)]}),
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


def test_a_buffer_of_another_librarys_class_is_not_judged(tmp_path):
    _, optimizer = trained(KNOWN["torch.RMSprop"], 3)
    saved = optimizer.state_dict()
    assert expected(tmp_path, torch.ones(64, 64), saved) is not None
    # timm's RMSpropTF, whose buffer includes the rate.
    saved["param_groups"][0]["lr_in_momentum"] = True
    assert expected(tmp_path, torch.ones(64, 64), saved) is None


@pytest.mark.parametrize("kind", ["ADOPT", "NAdam", "RAdam"])
def test_other_rules_with_adams_moments_are_not_judged_as_adam(kind, tmp_path):
    for module in (torch_bf16, torch.optim):
        if make := getattr(module, kind, None):
            parameter, optimizer = trained(lambda p, make=make: make(p, lr=1e-5), 3)
            assert expected(tmp_path, parameter, optimizer.state_dict()) is None


def test_what_a_schedule_leaves_in_a_group_is_no_option(tmp_path):
    parameter, optimizer = trained(KNOWN["torch.AdamW"], 3)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=9)
    assert expected(tmp_path, parameter, optimizer.state_dict()) is not None
