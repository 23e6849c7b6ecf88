"""Weights and gradients of other libraries' classes, which have no address: used, or refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from wrapped_tensors import Quantised, Shown, Silent

import torch_bf16
from torch_bf16 import AdamW

RECIPES = ("bf16-stochastic", "bf16-fp32-master")
both_backends = pytest.mark.parametrize("backend", ["cpu", "eager"])


def numbers(seed, dtype=torch.bfloat16):
    return torch.randn(6, 10, generator=torch.Generator().manual_seed(seed)).to(dtype)


def trained(weight, wrap, recipe, backend, steps=3):
    """An optimizer of one weight after some steps, its gradients as ``wrap`` makes them."""
    optimizer = AdamW([weight], lr=0.1, recipe=recipe, backend=backend)
    for step in range(steps):
        weight.grad = wrap(numbers(step))
        optimizer.step()
    return optimizer


def bits(optimizer):
    (weight,) = optimizer.param_groups[0]["params"]
    held = weight.held if isinstance(weight, Shown) else weight
    states = {k: v for k, v in optimizer.state[weight].items() if k != "step"}
    return [each.detach().clone() for each in (held, *states.values())]


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@both_backends
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_class_shows_is_trained_where_it_lies(recipe, backend):
    plain = trained(nn.Parameter(numbers(9)), lambda g: g, recipe, backend)
    wrapped = trained(nn.Parameter(Shown(numbers(9))), lambda g: g, recipe, backend)
    assert type(wrapped.param_groups[0]["params"][0]) is Shown
    assert same(bits(plain), bits(wrapped))
    wrapped = trained(nn.Parameter(Shown(Shown(numbers(9)))), Shown, recipe, backend)
    assert same(bits(plain)[1:], bits(wrapped)[1:])


@both_backends
def test_a_gradient_may_be_of_such_a_class_at_any_step(backend):
    plain = trained(nn.Parameter(numbers(9)), lambda g: g, RECIPES[0], backend, 4)
    mixed = trained(nn.Parameter(numbers(9)), lambda g: g, RECIPES[0], backend, 2)
    (weight,) = mixed.param_groups[0]["params"]
    for step, wrap in ((2, Shown), (3, lambda g: g)):
        weight.grad = wrap(numbers(step))
        mixed.step()
    assert same(bits(plain), bits(mixed))


def test_other_tensors_beside_the_one_do_no_harm():
    weight = nn.Parameter(Shown(numbers(9), scale=torch.ones(())))
    plain = trained(nn.Parameter(numbers(9)), lambda g: g, RECIPES[0], "cpu")
    assert same(bits(plain), bits(trained(weight, lambda g: g, RECIPES[0], "cpu")))


def test_a_write_to_the_weight_drops_its_remainder():
    optimizer = trained(nn.Parameter(Shown(numbers(9))), lambda g: g, RECIPES[1], "cpu")
    (weight,) = optimizer.param_groups[0]["params"]
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(optimizer.exact_weight(weight), weight.held.float())


def test_another_tensor_inside_is_seen():
    optimizer = trained(nn.Parameter(Shown(numbers(9))), lambda g: g, RECIPES[0], "cpu")
    (weight,) = optimizer.param_groups[0]["params"]
    left, weight.held = weight.held, weight.held.clone()
    before = left.clone()
    optimizer.step()
    assert torch.equal(left, before)
    assert not torch.equal(weight.held, before)


def quantised(shape=(6, 10)):
    return Quantised(torch.zeros(shape, dtype=torch.uint8), scale=torch.ones(shape[0]))


REFUSED = {
    "bytes": (quantised, r"Quantised, which says that it is torch.bfloat16 and holds held \(torch."
              r"uint8, shape \(6, 10\)\), scale \(torch.float32, shape \(6,\)\): none of these"),
    "two": (lambda: Shown(numbers(1), twin=numbers(2)), r"Shown, which .* 2 of these have its dty"),
    "silent": (lambda: Silent(numbers(1)), r"Silent without memory: it was freed, or the class d"),
}  # fmt: skip


@both_backends
@pytest.mark.parametrize("kind", REFUSED)
def test_a_weight_that_no_address_leads_to_is_refused_by_name(kind, backend):
    make, match = REFUSED[kind]
    with pytest.raises(ValueError, match=rf"parameter number 0 of group 0.* is a wrap.*{match}"):
        AdamW([nn.Parameter(make())], backend=backend)


@both_backends
@pytest.mark.parametrize("kind", REFUSED)
def test_a_gradient_that_no_address_leads_to_is_refused_by_name(kind, backend):
    make, match = REFUSED[kind]
    optimizer = trained(nn.Parameter(numbers(9)), lambda g: g, RECIPES[1], backend)
    before = bits(optimizer)
    (weight,) = optimizer.param_groups[0]["params"]
    weight.grad = make()
    with pytest.raises(ValueError, match=rf"has a gradient that is a .*{match}.*Nothing was upd"):
        optimizer.step()
    assert same(before, bits(optimizer))


def test_a_weight_whose_memory_was_freed_is_refused():
    optimizer = trained(nn.Parameter(numbers(9)), lambda g: g, RECIPES[0], "cpu")
    (weight,) = optimizer.param_groups[0]["params"]
    weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"is a torch.nn.parameter.Parameter without memory"):
        optimizer.step()


def test_sums_of_such_gradients_are_those_of_plain_ones():
    def summed(wrap):
        model = nn.Linear(10, 6, bias=False).to(torch.bfloat16)
        with torch.no_grad():
            model.weight.copy_(numbers(9))
        optimizer = AdamW(model.named_parameters(), lr=0.1)
        torch_bf16.accumulate_gradients(model, optimizer, "bf16_stochastic")
        for seed in range(3):
            model(numbers(seed)).sum().backward()
            model.weight.grad = wrap(model.weight.grad)
        return model.weight.grad

    assert torch.equal(summed(lambda g: g), summed(Shown).held)


def test_a_cast_keeps_the_class_and_what_the_weight_lost():
    model = nn.Linear(10, 6, bias=False)
    exact = model.weight.detach().clone()
    model.weight = nn.Parameter(Shown(model.weight.detach()))
    torch_bf16.cast_model(model, "bf16-fp32-master")
    assert type(model.weight) is Shown
    assert model.weight.dtype == model.weight.held.dtype == torch.bfloat16
    optimizer = AdamW(model.named_parameters(), recipe="bf16-fp32-master")
    assert torch.equal(optimizer.exact_weight(model.weight), exact)


def test_an_average_of_them_is_refused():
    model = nn.Linear(10, 6, bias=False)
    model.weight = nn.Parameter(Shown(model.weight.detach()))
    with pytest.raises(NotImplementedError, match=r"average of a wrapped_tensors.Shown"):
        torch_bf16.EMA(model)


class _AsBytes:
    """FSDP2's collective over gloo, which knows no 8-bit floats."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        parts = [*output_tensor.view(torch.uint8).chunk(dist.get_world_size(group))]
        return dist.all_gather(parts, input_tensor.view(torch.uint8), group, async_op)


def train_float8(recipe, order, backend):
    """Losses of a float8 model under FSDP2, this rank's weights, and its exact first ones."""
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False))
    whole = model[0].weight.detach().clone()
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    if order == "cast first":
        torch_bf16.cast_model(model, recipe)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=DeviceMesh("cpu", [0, 1]), mp_policy=policy)
    model.set_custom_all_gather(_AsBytes())  # pyright: ignore
    if order == "shard first":
        torch_bf16.cast_model(model, recipe)
    kinds = [type(p._local_tensor).__name__ for p in model.parameters()]
    optimizer = AdamW(model.named_parameters(), lr=1e-2, recipe=recipe, backend=backend)
    first = optimizer.exact_weight(model[0].weight).to_local()
    exact = torch.equal(first, whole.chunk(2)[dist.get_rank()])
    x, losses = torch.randn(16, 32).to(torch.bfloat16), []
    for step in range(8):
        optimizer.zero_grad()
        loss = (model(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        if step % 2:
            precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(loss.item())
    after = [p._local_tensor._tensor.detach().float() for p in model.parameters()]
    return losses, after, kinds, exact


@pytest.mark.parametrize("recipe", RECIPES)
def test_torchao_float8_weights_train_under_fsdp2(ranks, recipe):
    pytest.importorskip("torchao.float8")
    if not hasattr(torch.distributed.fsdp.FSDPModule, "set_custom_all_gather"):
        pytest.skip("gloo cannot gather 8-bit floats, and this torch cannot be told how to")
    found = {}
    for order, backend in (("cast first", "cpu"), ("shard first", "cpu"), ("cast first", "eager")):
        found[order, backend] = ranks(2, train_float8, recipe, order, backend)
        for losses, _, kinds, exact in found[order, backend]:
            assert losses[-1] < losses[0] / 4
            assert kinds == ["WeightWithDynamicFloat8CastTensor"] * 2
            assert exact == (recipe == "bf16-fp32-master")
    first, *others = found.values()
    for other in others:
        assert all(same(a[1], b[1]) for a, b in zip(first, other, strict=True))
