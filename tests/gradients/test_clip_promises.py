"""What clipping promises for the next step goes with the gradients that it was computed for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16 import plugin_api


def run():
    """Descent at rate 1 on two weights; the norm of the gradients is 8."""
    parameters = [nn.Parameter(torch.zeros(4, 2)) for _ in range(2)]
    optimizer = torch_bf16.SGD(parameters, lr=1.0)
    give(parameters, 2.0)
    return parameters, optimizer


def give(parameters, value):
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, value)


def assert_moved(parameters, by):
    for parameter in parameters:
        torch.testing.assert_close(parameter.detach(), torch.full((4, 2), -by), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("coefficient", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_clipping_counts_what_the_next_step_was_told_before(coefficient):
    parameters, optimizer = run()
    optimizer.scale_next_step(coefficient)
    other = nn.Parameter(torch.ones(1))
    other.grad = torch.full((1,), 2.0)
    asked = torch_bf16.total_norm([*parameters, other], optimizers=optimizer)
    torch.testing.assert_close(asked, torch.tensor(8.0**0.5))
    for limit, norm in ((100.0, 2.0), (1.0, 2.0), (1.0, 1.0)):
        found = torch_bf16.clip_next_step(optimizer, limit)
        torch.testing.assert_close(found, torch.tensor(norm))
    optimizer.step()
    assert_moved(parameters, 0.25)


@pytest.mark.parametrize("coefficient", [-0.5, torch.tensor(-0.5)], ids=["number", "tensor"])
def test_ascent_is_clipped_by_the_norm_as_well(coefficient):
    parameters, optimizer = run()
    optimizer.scale_next_step(coefficient)
    torch.testing.assert_close(
        torch_bf16.total_norm(parameters, optimizers=optimizer), torch.tensor(4.0)
    )
    torch.testing.assert_close(torch_bf16.clip_next_step(optimizer, 1.0), torch.tensor(4.0))
    optimizer.step()
    assert_moved(parameters, -0.25)


@pytest.mark.parametrize("coefficient", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_gradients_can_be_scaled_now_and_then_written(coefficient):
    parameters, optimizer = run()
    optimizer.scale_next_step(coefficient)
    torch_bf16.clip_next_step(optimizer, 2.0)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    torch_bf16.scale_gradients([optimizer, other])
    torch_bf16.scale_gradients(optimizer)
    for parameter in parameters:
        torch.testing.assert_close(parameter.grad, torch.full((4, 2), 0.5))
    nn.utils.clip_grad_value_(parameters, 0.125)
    optimizer.step()
    assert_moved(parameters, 0.125)


def test_only_optimizers_have_gradients_to_scale():
    with pytest.raises(ValueError, match="scale_gradients was given a Linear for an optimizer"):
        torch_bf16.scale_gradients(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="total_norm was given a Linear for an optimizer"):
        torch_bf16.total_norm(nn.Parameter(torch.ones(1)), optimizers=nn.Linear(2, 2))


def test_gradients_that_are_left_beside_released_ones_may_be_clipped():
    released, other = (nn.Parameter(torch.ones(4, 2).bfloat16()) for _ in range(2))
    optimizer = torch_bf16.SGD([released], lr=0.1, release={"max_norm": None})
    other.grad = torch.ones_like(other)
    plugin_api.refuse_released([released, other])
    other.grad = None
    with pytest.raises(NotImplementedError, match="nothing is left to clip"):
        plugin_api.refuse_released([released, other])
    plugin_api.refuse_released([other])
    del optimizer


def test_a_step_is_skipped_though_gradients_were_scaled_and_written():
    parameters, optimizer = run()
    give(parameters, float("nan"))
    torch_bf16.clip_next_step(optimizer, 1.0, skip_nonfinite=True)
    torch_bf16.scale_gradients(optimizer)
    give(parameters, 1.0)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert_moved(parameters, 0.0)


def test_what_was_clipped_for_gradients_that_are_gone_scales_no_others():
    parameters, optimizer = run()
    torch_bf16.clip_next_step(optimizer, 1.0)
    give(parameters, 0.5)
    torch_bf16.scale_gradients(optimizer)
    with pytest.warns(UserWarning, match=r"call torch_bf16.scale_gradients\(optimizer\) before"):
        optimizer.step()
    assert_moved(parameters, 0.5)


def test_no_parameters_have_norm_zero_whatever_the_next_step_was_told():
    parameters, optimizer = run()
    optimizer.scale_next_step(0.25)
    assert torch_bf16.clip_next_step(optimizer, 1.0, parameters=[]) == 0.0
    optimizer.step()
    assert_moved(parameters, 0.5)


def forget_by_hand(parameters):
    for parameter in parameters:
        parameter.grad = None


def forget_in_the_module(parameters):
    module = nn.Module()
    module.first, module.second = parameters
    module.zero_grad()


@pytest.mark.parametrize("forget", [forget_by_hand, forget_in_the_module])
def test_gradients_that_replaced_the_clipped_ones_are_not_scaled_and_that_is_said(forget):
    parameters, optimizer = run()
    torch_bf16.clip_next_step(optimizer, 1.0, skip_nonfinite=True)
    forget(parameters)
    give(parameters, 0.5)
    with pytest.warns(UserWarning, match="clipped and then replaced or written before a step"):
        optimizer.step()
    assert_moved(parameters, 0.5)
    optimizer.step()
    assert_moved(parameters, 1.0)


def test_a_second_step_on_clipped_gradients_scales_them_as_well(recwarn):
    parameters, optimizer = run()
    for norm in (8.0, 8.0):  # each clip is of the gradients as they are
        torch.testing.assert_close(torch_bf16.clip_next_step(optimizer, 1.0), torch.tensor(norm))
        optimizer.step()
    optimizer.step()
    assert_moved(parameters, 0.75)
    give(parameters, 0.5)
    optimizer.step()
    assert_moved(parameters, 1.25)
    torch_bf16.clip_next_step(optimizer, 1.0)
    optimizer.step()
    for parameter in parameters:
        parameter.grad += 1.0
    optimizer.step()
    assert_moved(parameters, 3.0)
    assert not recwarn


def test_a_second_step_on_gradients_without_a_norm_is_skipped_as_well():
    parameters, optimizer = run()
    give(parameters, float("inf"))
    torch_bf16.clip_next_step(optimizer, 1.0, skip_nonfinite=True)
    for _ in range(3):
        optimizer.step()
    assert_moved(parameters, 0.0)
    assert optimizer.skipped_steps == 3
    give(parameters, 0.5)
    optimizer.step()
    assert_moved(parameters, 0.5)


def test_what_the_program_asks_for_a_second_step_replaces_the_clip(recwarn):
    parameters, optimizer = run()
    torch_bf16.clip_next_step(optimizer, 1.0)
    optimizer.step()
    assert_moved(parameters, 0.25)
    for parameter in parameters:
        parameter.grad.data.fill_(0.5)  # torch counts no write
    optimizer.scale_next_step(1.0)
    optimizer.step()
    assert_moved(parameters, 0.75)
    assert not recwarn


def test_gradients_that_another_backward_added_to_are_not_scaled_by_half_of_them():
    parameters, optimizer = run()
    torch_bf16.clip_next_step(optimizer, 1.0)
    for parameter in parameters:
        parameter.grad += 1.0
    with pytest.warns(UserWarning, match="clipped and then replaced or written before a step"):
        optimizer.step()
    assert_moved(parameters, 3.0)


def test_a_clip_after_each_of_two_backward_passes_is_one_of_their_sum():
    parameters, optimizer = run()
    torch_bf16.clip_next_step(optimizer, 1.0)
    for parameter in parameters:
        parameter.grad += 1.0
    torch.testing.assert_close(torch_bf16.clip_next_step(optimizer, 1.0), torch.tensor(12.0))
    optimizer.step()
    assert_moved(parameters, 0.25)


def test_a_gradient_that_stays_keeps_the_promise():
    parameters, optimizer = run()
    torch_bf16.clip_next_step(optimizer, 1.0)
    parameters[0].grad = None
    optimizer.step()
    assert_moved(parameters[1:], 0.25)


@pytest.mark.parametrize("clips", [1, 2])
def test_gradients_that_come_after_a_clip_are_not_scaled_by_it(clips):
    parameters, optimizer = run()
    parameters[1].grad = None
    for _ in range(clips):  # the second is of what the first has left
        torch_bf16.clip_next_step(optimizer, 1.0)
    give(parameters[1:], 3.0)
    optimizer.step()
    assert_moved(parameters[:1], 8**-0.5)
    assert_moved(parameters[1:], 3.0)


def test_each_gradient_may_be_clipped_as_it_comes():
    parameters, optimizer = run()
    first, second = parameters
    second.grad = None
    torch_bf16.clip_next_step(optimizer, 1.0, parameters=first)
    give([second], 3.0)
    norm = torch_bf16.clip_next_step(optimizer, 2.0, parameters=second)
    torch.testing.assert_close(norm, torch.tensor(3 * 8**0.5))
    optimizer.step()
    assert_moved([first], 8**-0.5)
    assert_moved([second], 2 * 8**-0.5)


def test_a_load_between_clip_and_step_keeps_the_promise_and_counts_skipped_steps_anew():
    parameters, optimizer = run()
    optimizer.skip_next_step_where(torch.tensor(1.0))
    optimizer.step()
    assert optimizer.skipped_steps == 1
    torch_bf16.clip_next_step(optimizer, 1.0)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.skipped_steps == 0
    optimizer.step()
    assert_moved(parameters, 0.25)


def test_gradients_of_a_part_are_scaled_in_place_with_nothing_left_to_warn_of(recwarn):
    parameters, optimizer = run()
    norm = torch_bf16.clip_next_step(optimizer, 1.0, parameters=parameters[0])
    torch.testing.assert_close(norm, torch.tensor(32.0).sqrt())
    torch.testing.assert_close(torch_bf16.total_norm(parameters[0]), torch.tensor(1.0))
    assert torch.equal(parameters[1].grad, torch.full((4, 2), 2.0))
    give(parameters, 0.5)
    optimizer.step()
    assert_moved(parameters, 0.5)
    assert not recwarn.list


def test_a_step_is_skipped_for_the_norm_of_a_part():
    parameters, optimizer = run()
    parameters[0].grad[0, 0] = torch.nan
    torch_bf16.clip_next_step(optimizer, 1.0, parameters=parameters[0], skip_nonfinite=True)
    optimizer.step()
    assert_moved(parameters, 0.0)
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_step_is_skipped_for_the_norm_of_either_of_two_parts(order):
    parameters, optimizer = run()
    parameters[0].grad.fill_(float("nan"))
    for each in order:
        torch_bf16.clip_next_step(optimizer, 1.0, parameters=parameters[each], skip_nonfinite=True)
    optimizer.step()
    assert_moved(parameters, 0.0)
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("skip_nonfinite", [False, True])
@pytest.mark.parametrize("asked", ["before the clip", "between the clips", "between, number"])
def test_a_clip_takes_no_request_to_skip_back(asked, skip_nonfinite):
    parameters, optimizer = run()
    found_inf = torch.tensor(-1) if asked.endswith("number") else torch.tensor(1.0)
    if asked != "before the clip":
        torch_bf16.clip_next_step(optimizer, 1.0, skip_nonfinite=skip_nonfinite)
    optimizer.skip_next_step_where(found_inf)
    give(parameters, 1.0)
    torch_bf16.clip_next_step(optimizer, 1.0, skip_nonfinite=skip_nonfinite)
    optimizer.step()
    assert_moved(parameters, 0.0)
    assert optimizer.skipped_steps == 1
    give(parameters, 0.5)
    optimizer.step()
    assert_moved(parameters, 0.5)


def test_the_users_own_request_to_skip_is_for_whatever_gradients_come(recwarn):
    parameters, optimizer = run()
    torch_bf16.clip_next_step(optimizer, 1.0)
    optimizer.skip_next_step_where(torch.tensor(1.0))
    give(parameters, 1.0)
    optimizer.step()
    assert "their norm skips nothing" in str(recwarn.pop(UserWarning).message)
    assert_moved(parameters, 0.0)


def test_the_norm_of_what_a_clip_has_left_to_the_step_is_read_without_a_write():
    (clipped, other), optimizer = run()
    other.grad = None
    torch_bf16.clip_next_step(optimizer, 1.0)
    give([other], 0.5)
    for _ in range(2):
        norm = torch_bf16.total_norm([clipped, other], optimizers=optimizer)
        torch.testing.assert_close(norm, torch.tensor(3.0**0.5))
    assert torch.equal(clipped.grad, torch.full((4, 2), 2.0))


def test_clipping_a_part_leaves_an_earlier_clip_of_all_as_it_was():
    parameters, optimizer = run()
    torch_bf16.clip_next_step(optimizer, 4.0)
    found = torch_bf16.clip_next_step(optimizer, 1.0, parameters=parameters[0])
    torch.testing.assert_close(found, torch.tensor(8**0.5))
    optimizer.step()
    assert_moved(parameters[1:], 1.0)
    assert_moved(parameters[:1], 8**-0.5)


def test_the_norm_of_nothing_is_fp32_whatever_the_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch_bf16.total_norm(nn.Parameter(torch.zeros(2))).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_each_optimizer_gets_the_common_coefficient_by_the_way_that_it_can():
    one, other, foreign = ([nn.Parameter(torch.zeros(4, 2))] for _ in range(3))
    both = nn.Parameter(torch.zeros(4, 2))
    ours = [torch_bf16.SGD(own, lr=1.0) for own in (one, [*other, both], [both])]
    torchs = torch.optim.SGD(foreign, lr=1.0)
    everything = [*one, *other, *foreign, both]
    give(everything, 2.0)
    # Of four: a quarter of the square is told to be a quarter of itself.
    ours[0].scale_next_step(0.5)
    norm = torch_bf16.clip_next_step([*ours, torchs], 1.0)
    torch.testing.assert_close(norm, torch.tensor((8 * 3 * 4.0 + 8 * 1.0) ** 0.5))
    assert torch.equal(one[0].grad, torch.full((4, 2), 2.0))
    for parameter in everything[1:]:
        torch.testing.assert_close(parameter.grad, torch.full((4, 2), 2.0) / norm)
    ours[0].step()
    assert_moved(one, 1.0 / norm.item())


def test_norms_whose_squares_overflow_in_fp32_are_added_up_right():
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e25)
    assert torch_bf16.total_norm(parameters).item() == pytest.approx(2e25)
    optimizer = torch_bf16.SGD(parameters, lr=1.0)
    torch_bf16.clip_next_step(optimizer, 1.0)
    optimizer.step()
    torch.testing.assert_close(torch.cat(parameters), torch.full((4,), -0.5))


@pytest.mark.parametrize("bound", [-1.0, float("nan"), True, "1", torch.ones(2)], ids=str)
def test_a_bound_that_is_none_is_refused(bound):
    parameters, optimizer = run()
    said = "must be a number of at least 0, or a tensor with one"
    with pytest.raises(ValueError, match=said):
        torch_bf16.clip_grad_norm_(parameters, bound)
    with pytest.raises(ValueError, match=said):
        torch_bf16.clip_next_step(optimizer, bound)


def test_a_parameter_that_is_given_twice_counts_once():
    p = torch.nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    assert torch_bf16.total_norm([p, p]) == 2.0
    assert torch_bf16.clip_grad_norm_([p, p], 1.0) == 2.0
    assert torch.allclose(p.grad, torch.full((4,), 0.5))


def test_a_sparse_gradient_has_no_norm_here():
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    parameter.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(ValueError, match=r"shape \(3, 2\) has a gradient of torch.sparse_coo"):
        torch_bf16.total_norm([parameter])
