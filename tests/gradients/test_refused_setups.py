"""A set-up of gradients that is refused leaves everything as it was."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import torch_bf16
from torch_bf16.gradients.ddp_hook import hook_holder


def made(**options):
    model = torch_bf16.cast_model(nn.Linear(8, 8, bias=False))
    optimizer = torch_bf16.SGD(model.named_parameters(), lr=0.5)
    return DistributedDataParallel(model, **options), optimizer


def test_an_accumulation_goes_on_if_another_is_refused(one_rank):
    model, optimizer = made(find_unused_parameters=True)
    handle = torch_bf16.accumulate_gradients(model, optimizer, "bf16_stochastic")
    with pytest.raises(ValueError, match="find_unused_parameters"):
        torch_bf16.accumulate_gradients(model, optimizer, "fp32")
    assert optimizer._engine.accumulation is handle
    weight = model.module.weight
    with model.no_sync():
        for number in range(257):
            (model(torch.ones(1, 8).bfloat16()) * (2.0**-9 if number else 1.0)).sum().backward()
    assert weight.grad.float().mean() > 1.25  # torch's own sum would stay at 1


def test_no_ddp_module_keeps_a_hook_if_another_is_refused(one_rank):
    first, optimizer = made()
    second, _ = made()
    second.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(ValueError, match=r"has that of .*allreduce_hook"):
        torch_bf16.reduce_gradients(nn.ModuleList([first, second]), optimizer)
    assert hook_holder(first) is None
    torch_bf16.reduce_gradients(first, optimizer)
    assert hook_holder(first) == "reduce='bf16_wire'"


def test_a_hook_that_torch_has_built_in_is_named(one_rank):
    model, optimizer = made()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    with pytest.raises(ValueError, match=r"that of BuiltinCommHookType.FP16_COMPRESS"):
        torch_bf16.reduce_gradients(model, optimizer)


def test_gradients_are_not_released_beside_a_hook_that_torch_has_built_in(one_rank):
    model, optimizer = made()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.warns(UserWarning, match=r"stay until optimizer.step\(\).*BuiltinCommHookType"):
        torch_bf16.release_gradients(model, optimizer)
    before = model.module.weight.detach().clone()
    model(torch.ones(1, 8).bfloat16()).sum().backward()
    assert torch.equal(model.module.weight, before)
    optimizer.step()
    assert not torch.equal(model.module.weight, before)


def test_torchs_own_sums_get_no_hooks_from_a_release_that_follows():
    model = torch_bf16.cast_model(nn.Linear(8, 8, bias=False))
    optimizer = torch_bf16.SGD(model.named_parameters(), lr=0.5)
    torch_bf16.accumulate_gradients(model, optimizer, "bf16_nearest")
    torch_bf16.release_gradients(model, optimizer, accumulation_steps=9)
    assert not model.weight._backward_hooks


def test_a_group_is_not_added_if_its_gradients_take_no_hooks():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch_bf16.SGD([weight], lr=0.5, release={"max_norm": None})
    computed = weight * 1
    computed.retain_grad()
    with pytest.raises(RuntimeError):
        optimizer.add_param_group({"params": [computed]})
    assert len(optimizer.param_groups) == 1
    weight.sum().backward()
    optimizer.step()
    assert torch.equal(weight, torch.full_like(weight, 0.5))


def test_a_release_that_is_refused_leaves_sums_to_torch():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    recipe = torch_bf16.get_recipe("bf16-stochastic", accumulate="fp32")
    with pytest.raises(ValueError, match="max_norm=-1"):
        torch_bf16.SGD([weight], lr=0.5, recipe=recipe, release={"max_norm": -1})
    weight.sum().backward()
    assert weight.grad.dtype == torch.bfloat16
