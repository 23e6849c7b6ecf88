"""Parameters whose gradients are summed in a format, and that the optimizer has no more."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torch_bf16
from torch_bf16 import Recipe

BF16, TINY = torch.bfloat16, 2.0**-10


def parameter():
    return nn.Parameter(torch.ones(8, 8, dtype=BF16))


def sgd(parameters, accumulate):
    return torch_bf16.SGD(parameters, lr=0.5, recipe=Recipe(accumulate=accumulate))


def add(parameter, gradient):
    (parameter * gradient).sum().backward()


def add_many(parameter):
    """What a sum in bf16 loses: 1, and a spacing of that in eight parts."""
    parameter.grad = None
    add(parameter, torch.ones((), dtype=BF16))
    for _ in range(8):
        add(parameter, torch.tensor(TINY, dtype=BF16))


def test_a_parameter_that_left_has_gradients_of_its_own_dtype_from_the_next_step_on():
    stays, left = parameter(), parameter()
    optimizer = sgd([{"params": [stays]}, {"params": [left]}], "fp32")
    add(stays, torch.ones((), dtype=BF16))
    add(left, torch.ones((), dtype=BF16))
    del optimizer.param_groups[1]
    optimizer.step()
    assert (stays.grad.dtype, left.grad.dtype) == (torch.float32, BF16)
    add(left, torch.ones((), dtype=BF16))
    assert left.grad.eq(2).all()
    assert left.grad.dtype == BF16


@pytest.mark.parametrize("steps", [0, 1])
def test_what_another_optimizer_sums_in_fp32_is_left_to_it(steps):
    stays, left = parameter(), parameter()
    first = sgd([{"params": [stays]}, {"params": [left]}], "fp32")
    del first.param_groups[1]
    second = sgd([left], "fp32")
    for _ in range(steps):
        add(stays, torch.ones((), dtype=BF16))
        first.step()
    first._engine.accumulation.remove()
    add_many(left)
    assert left.grad.eq(1 + 8 * TINY).all()
    second.step()
    add_many(left)
    assert left.grad.eq(1 + 8 * TINY).all()


@pytest.mark.parametrize("ends", [0, 1])
@pytest.mark.parametrize("format", ["bf16_stochastic", "fp32"])
def test_an_accumulation_goes_on_if_another_of_a_shared_parameter_ends(format, ends):
    shared = parameter()
    optimizers = [sgd([shared], "fp32"), sgd([shared], format)]
    add(shared, torch.ones((), dtype=BF16))
    optimizers.pop(ends)._engine.accumulation.remove()
    (left,) = optimizers
    wide = left._engine.accumulation.format == "fp32"
    assert shared.grad.dtype == (torch.float32 if wide else BF16)
    if wide:
        add_many(shared)
        assert shared.grad.eq(1 + 8 * TINY).all()
    left._engine.accumulation.remove()
    assert shared.grad.dtype == BF16
    add(shared, torch.ones((), dtype=BF16))
    assert shared.grad.dtype == BF16


def test_the_noise_of_a_sum_is_that_of_the_optimizer_that_has_the_parameter():
    sums = []
    for before in (False, True):
        left, moved = parameter(), []
        if before:
            moved.append(sgd([{"params": [parameter()]}, {"params": [left]}], "bf16_stochastic"))
            del moved[0].param_groups[1]
        optimizer = sgd([("left", left)], "bf16_stochastic")
        for _ in range(2):
            add_many(left)
            sums.append(left.grad.clone())
            optimizer.step()
    assert not torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    assert torch.equal(sums[1], sums[3])


@pytest.mark.parametrize("accumulate", ["bf16_stochastic", "bf16_nearest"])
def test_an_optimizer_of_an_earlier_training_that_still_lives_sums_no_more(accumulate):
    sums = []
    for before in (False, True):
        trained, living = parameter(), []
        if before:
            living.append(sgd([("trained", trained)], "bf16_stochastic"))
            add_many(trained)
            living[0].step()
        optimizer = sgd([("trained", trained)], accumulate)
        for _ in range(2):
            add_many(trained)
            sums.append(trained.grad.clone())
            optimizer.step()
    assert torch.equal(sums[0], sums[2])
    assert torch.equal(sums[1], sums[3])
    # Its steps number the noise, and it takes no more of them.
    assert torch.equal(sums[2], sums[3]) is (accumulate == "bf16_nearest")


def test_of_two_optimizers_the_one_that_steps_numbers_the_noise():
    trained = parameter()
    both = [sgd([("trained", trained)], "bf16_stochastic") for _ in range(2)]
    for optimizer in both:
        sums = []
        for _ in range(4):
            add_many(trained)
            sums.append(trained.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
        # The first sum of a phase is still numbered by the steps of the phase before.
        assert not any(map(torch.equal, sums[1:], sums[2:]))


@pytest.mark.parametrize("accumulate", ["bf16_stochastic", "fp32"])
@pytest.mark.parametrize("watched", [False, True], ids=["gathered", "alone"])
def test_a_parameter_that_left_is_not_kept_alive(accumulate, watched):
    stays, left = parameter(), parameter()
    optimizer = sgd([{"params": [stays]}, {"params": [left]}], accumulate)
    if watched:
        # Something may read the sum, so that it does not wait for others.
        left.register_post_accumulate_grad_hook(lambda _: None)
    for _ in range(2):
        add(left, torch.ones((), dtype=BF16))
    reference = weakref.ref(left)
    optimizer.step()
    del optimizer.param_groups[1], optimizer.state[left], left
    add(stays, torch.ones((), dtype=BF16))
    optimizer.step()
    gc.collect()
    assert reference() is None


class Call(torch.autograd.Function):
    """A function that is called when the backward pass comes by."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.function()
        return None, gradient


def test_a_parameter_that_leaves_while_its_gradient_waits_keeps_its_sum():
    last, stays, left = parameter(), parameter(), parameter()
    optimizer = sgd([{"params": [last, stays]}, {"params": [left]}], "bf16_stochastic")

    def leave():
        del optimizer.param_groups[1:]
        optimizer.step()

    for function in (lambda: None, leave):
        (Call.apply(function, last) + stays + left).sum().backward()
    assert all(each.grad.eq(2).all() for each in (last, stays, left))


def sum_beside_another_optimizer(accumulate):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).bfloat16()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    ours, theirs = model.parameters()
    optimizer = sgd([ours], accumulate)
    torch_bf16.accumulate_gradients(model, optimizer)
    torch_bf16.accumulate_gradients(model, sgd([theirs], "bf16_nearest"))
    x = torch.ones(2, 4, dtype=BF16)
    model(x).sum().backward()
    once = [p.grad.full_tensor().clone() for p in (ours, theirs)]
    model(x).sum().backward()
    for p, gradient in zip((ours, theirs), once, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), 2 * gradient)


@pytest.mark.parametrize("accumulate", ["bf16_stochastic", "fp32"])
def test_gradients_of_other_optimizers_in_a_unit_of_fsdp2_are_summed_by_torch(ranks, accumulate):
    ranks(1, sum_beside_another_optimizer, accumulate)


def sum_onto_zeros_in_bf16():
    model = torch_bf16.cast_model(nn.Linear(8, 8, bias=False))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    optimizer = sgd(model.parameters(), "fp32")
    torch_bf16.accumulate_gradients(model, optimizer)
    (p,) = model.parameters()
    p.grad = torch.zeros_like(p)
    for each in (1.0, *[TINY] * 8):
        model(torch.full((1, 8), each, dtype=BF16)).sum().backward()
    assert torch.equal(p.grad.full_tensor(), torch.full((8, 8), 1 + 8 * TINY))


def test_zeros_in_bf16_do_not_round_the_fp32_sums_of_fsdp2(ranks):
    ranks(1, sum_onto_zeros_in_bf16)


def test_an_optimizer_that_is_gone_is_freed_under_ddp_and_the_next_one_sums(one_rank):
    model = nn.Linear(8, 8)
    torch_bf16.cast_model(model, "bf16-fp32-master")
    ddp = nn.parallel.DistributedDataParallel(model)
    states = []
    for _ in range(3):
        optimizer = torch_bf16.AdamW(model.parameters(), recipe="bf16-fp32-master")
        torch_bf16.accumulate_gradients(ddp, optimizer, "fp32")
        for _ in range(2):
            ddp(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
        assert torch.equal(model.weight.grad, torch.full((8, 8), 4.0))
        optimizer.step()
        optimizer.zero_grad()
        states.append(weakref.ref(optimizer.state[model.weight]["exp_avg"]))
        del optimizer
        gc.collect()
    assert [each() for each in states] == [None] * 3
