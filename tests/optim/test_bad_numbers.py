"""What is no number where one is needed is refused with what is needed."""

import pytest
import torch
from torch import nn

import torch_bf16

PARAMETER = nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize("found", [torch.zeros(2), torch.zeros(0), True, 1.0, None], ids=str)
def test_what_does_not_say_whether_to_skip_is_refused(found):
    optimizer = torch_bf16.AdamW([PARAMETER])
    with pytest.raises(ValueError, match=r"found_inf=.* must be a tensor with one element"):
        optimizer.skip_next_step_where(found)


@pytest.mark.parametrize("kind", [torch_bf16.Lion, torch_bf16.ADOPT, torch_bf16.AdamWScheduleFree])
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lr": "1e-3"}, "lr='1e-3' must be a number of at least 0"),
        ({"lr": torch.tensor([1.0, 2.0])}, r"lr=tensor\(.* must be a number of at least 0"),
        ({"lr": None}, "lr=None must be a number of at least 0"),
        ({"betas": 0.9}, "betas=0.9 must be two numbers, each at least 0 and below 1"),
        ({"betas": ("0.9", 0.99)}, "must be two numbers, each at least 0 and below 1"),
        ({"betas": "ab"}, "betas='ab' must be two numbers"),
    ],
    ids=str,
)
def test_hyperparameters_that_are_no_numbers_are_refused(kind, options, match):
    with pytest.raises(ValueError, match=match):
        kind([PARAMETER], **options)


@pytest.mark.parametrize("lr", [0, torch.tensor(0.5), torch.tensor([0.5])], ids=str)
def test_a_tensor_with_one_element_is_a_number(lr):
    assert torch_bf16.Lion([PARAMETER], lr=lr, betas=[0.9, torch.tensor(0.99)])


@pytest.mark.parametrize("name", ["r", "weight_lr_power"])
@pytest.mark.parametrize(("wrong", "message"), [(float("inf"), "finite"), (None, "a number")])
def test_a_group_that_gives_no_average_is_refused_before_anything_changes(name, wrong, message):
    parameter = nn.Parameter(torch.ones(2, 2))
    match = f"^parameter group 0: {name}={wrong} must be {message}"
    with pytest.raises(ValueError, match=match):
        torch_bf16.SGDScheduleFree([{"params": [parameter], name: wrong}])
    optimizer = torch_bf16.SGDScheduleFree([parameter])
    parameter.grad = torch.ones(2, 2)
    optimizer.step()
    before = parameter.detach().clone()
    optimizer.param_groups[0][name] = wrong
    for call, end in ((optimizer.step, "updated"), (optimizer.eval, "changed")):
        with pytest.raises(ValueError, match=f"{match}.*Nothing was {end}$"):
            call()
    assert torch.equal(parameter, before)
    assert (optimizer.param_groups[0]["k"], optimizer.param_groups[0]["train_mode"]) == (1, True)
