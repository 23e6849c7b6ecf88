"""What a step refuses before it updates anything, and that the optimizer steps on afterwards."""

import copy

import pytest
import torch
from bad_input_cases import (
    BF16,
    assert_equal,
    assert_step_refused,
    assert_steps,
    begun,
    every_class,
    everything,
    give_gradients,
    parameter,
    params,
)
from torch import nn

import torch_bf16
from torch_bf16 import StateMismatchError


@every_class
def test_a_sparse_gradient_is_refused_and_the_others_wait(ours):
    embedding = nn.Embedding(4, 3, sparse=True, dtype=BF16)
    linear = parameter()
    optimizer = ours([linear, embedding.weight], lr=0.1)
    linear.grad = torch.ones_like(linear)
    embedding(torch.tensor([1, 2])).sum().backward()
    assert_step_refused(optimizer, ValueError, r"'#1' .* sparse gradient .*Embedding\(sparse=False")
    assert not optimizer.state
    with pytest.raises(ValueError, match=r"total_norm: .* shape \(4, 3\) .*sparse_coo"):
        torch_bf16.total_norm(params(optimizer))
    embedding.weight.grad = None
    assert_steps(optimizer)


@every_class
def test_an_fp16_gradient_is_refused(ours):
    p = parameter(dtype=torch.float16)
    p.grad = torch.ones_like(p)
    p.data = p.data.to(BF16)
    optimizer = ours([p], lr=0.1)
    assert_step_refused(
        optimizer, ValueError, "'#0' .* gradient of dtype torch.float16; it must be"
    )
    assert_steps(optimizer)


@every_class
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_a_parameter_recast_or_added_behind_our_back_is_refused_at_its_first_step(ours, dtype):
    """Its bits would be read as bf16."""
    optimizer = begun(ours)
    late = parameter()
    late.grad = torch.ones_like(late)
    late.data = late.data.to(dtype)
    optimizer.param_groups[1]["params"].append(late)
    assert_step_refused(optimizer, ValueError, f"'#2' .* is {dtype}; bfloat16, float32 and")
    optimizer.param_groups[1]["params"].pop()
    assert_steps(optimizer)


@every_class
def test_a_parameter_that_is_in_a_group_twice_is_refused_by_the_step(ours):
    optimizer = begun(ours, steps=0)
    optimizer.param_groups[1]["params"].append(params(optimizer)[0])
    assert_step_refused(optimizer, ValueError, "group 0, .* is also number . of group 1; remove")
    optimizer.param_groups[1]["params"].pop()
    assert_steps(optimizer)


@every_class
def test_a_lazily_negated_gradient_counts_with_its_sign(ours):
    optimizer, twin = begun(ours), begun(ours)
    for p, q in zip(params(optimizer), params(twin), strict=True):
        p.grad = torch._neg_view(torch.full_like(p, 0.25).detach())
        q.grad = torch.full_like(q, -0.25)
        assert p.grad.is_neg()
    optimizer.step()
    twin.step()
    assert_equal(everything(optimizer), everything(twin))


@every_class
@pytest.mark.parametrize("size", [2, 400], ids=["shrunk", "grown"])
def test_a_gradient_of_another_size_is_refused_before_memory_is_touched(ours, size):
    p = parameter()
    p.grad = torch.ones_like(p)
    p.data = torch.ones(size, size, dtype=BF16)
    optimizer = ours([p], lr=0.1)
    assert_step_refused(
        optimizer, ValueError, r"has a gradient of shape \(4, 3\) .*Call zero_grad\(\) and backward"
    )
    assert_steps(optimizer)


@pytest.mark.parametrize("coefficient", [None, "0.5", torch.ones(2), [0.5], 1j], ids=str)
def test_a_scale_that_is_no_number_is_refused(coefficient):
    optimizer = begun()
    with pytest.raises(
        ValueError, match=r"coefficient=.* must be a finite number or a tensor with one"
    ):
        optimizer.scale_next_step(coefficient)
    assert_steps(optimizer)


def reshaped(p):
    p.data = p.data.reshape(-1).clone()


def recast(p):
    p.data = p.data.float()


def recast_to_fp16(p):
    p.data = p.data.half()


def moved(p):
    # As module.to("meta") does under torch.__future__.set_swap_module_params_on_conversion.
    torch.utils.swap_tensors(p, nn.Parameter(p.detach().to("meta")))


CHANGES = {
    reshaped: r"was torch.bfloat16 of shape \(4, 3\) at the last step .*Change it back, or make",
    recast: "was torch.bfloat16 .* changed since. Change it back, or make a new optimizer",
    recast_to_fp16: "torch.float16.* was torch.bfloat16 .* at the last step and was changed since",
    moved: "is on meta and its optimizer state on cpu: it was moved .*let the state follow",
}


@every_class
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_parameter_changed_after_the_first_step_is_refused(ours, change):
    optimizer = begun(ours, recipe="bf16-fp32-master")
    p = params(optimizer)[0]
    kept = p.data
    twin = nn.Parameter(p.detach().clone())
    change(p)
    p.grad = torch.full_like(p, 0.5)
    others = everything(optimizer)[1:]
    with pytest.raises(StateMismatchError, match="'#0' .*" + CHANGES[change]):
        optimizer.step()
    assert len(others) == len(everything(optimizer)[1:])
    for a, b in zip(others, everything(optimizer)[1:], strict=True):
        assert torch.equal(a, b)
    p.grad = None
    if change is moved:
        torch.utils.swap_tensors(p, twin)
    else:
        p.data = kept
    assert_steps(optimizer)


@every_class
def test_a_replaced_parameter_is_refused(ours):
    optimizer = begun(ours)
    old = params(optimizer)[0]
    new = parameter()
    optimizer.param_groups[0]["params"][0] = new
    give_gradients(optimizer)
    assert_step_refused(
        optimizer, StateMismatchError, r"'#0' .*has no optimizer state, .*shape \(4, 3\).*replaced"
    )
    optimizer.param_groups[0]["params"][0] = old
    assert_steps(optimizer)
    optimizer.param_groups[0]["params"][0] = new
    del optimizer.state[old]
    assert_steps(optimizer)


def test_a_group_that_was_taken_out_is_not_said_to_be_replaced():
    optimizer = begun()
    (first,) = optimizer.param_groups.pop(0)["params"]
    optimizer.add_param_group({"params": [parameter()]})
    give_gradients(optimizer)
    match = (
        r"any more\. If the new one replaced it .*If it was taken out on purpose, drop its state"
    )
    with pytest.raises(StateMismatchError, match=match):
        optimizer.step()
    del optimizer.state[first]
    assert_steps(optimizer)


def test_a_parameter_replaced_before_the_first_step_is_taken():
    """Accelerate does so."""
    optimizer = begun(steps=0)
    optimizer.param_groups[0]["params"][0] = parameter()
    assert_steps(optimizer)


@every_class
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["other memory", "other dtype"])
def test_state_whose_memory_was_exchanged_is_found_where_it_is(ours, dtype):
    """``v.data = v.data.to(device)`` keeps the tensor; the kernels must not use the old memory."""
    options = {"momentum": 0.9} if ours is torch_bf16.SGD else {}
    optimizer, twin = begun(ours, **options), begun(ours, **options)
    exchanged = 0
    for state in optimizer.state.values():
        for key, value in state.items():
            if key != "step" and (dtype is None or value.dtype == BF16):
                value.data = value.data.clone() if dtype is None else value.data.to(dtype)
                exchanged += 1
    assert exchanged
    for each in (optimizer, twin):
        give_gradients(each)
        each.step()
    assert_equal(everything(optimizer), everything(twin))


@every_class
def test_state_of_another_shape_is_refused(ours):
    options = {"momentum": 0.9} if ours is torch_bf16.SGD else {}
    optimizer = begun(ours, **options)
    state = optimizer.state[params(optimizer)[0]]
    key = next(k for k in state if k != "step")
    kept, state[key] = state[key], torch.zeros(2)
    assert_step_refused(optimizer, StateMismatchError, rf"{key} of .* shape \(2,\) .*\(4, 3\)")
    state[key] = kept
    assert_steps(optimizer)


def test_an_error_in_the_closure_changes_nothing():
    optimizer = begun()

    def closure():
        raise KeyError("loss")

    before = everything(optimizer)
    with pytest.raises(KeyError, match="loss"):
        optimizer.step(closure)
    assert_equal(everything(optimizer), before)
    assert_steps(copy.deepcopy(optimizer))
    assert_steps(optimizer)
