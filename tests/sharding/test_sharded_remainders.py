"""What a cast took from weights that FSDP2 then puts other parameters in place of."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import torch_bf16
from torch_bf16.model import remainders


@pytest.mark.parametrize("recipe", ["bf16-fp32-master", "bf16-stochastic"])
@pytest.mark.parametrize("gathered", [False, True], ids=["sharded", "gathered-for-an-evaluation"])
def test_it_is_found_by_looking_through_the_modules_a_few_times_and_freed(
    one_rank, recipe, gathered
):
    """However many there are: 1600 parameters took 10 s where each was looked for in all."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
    exact = [p.detach().clone() for p in model.parameters()]
    torch_bf16.cast_model(model, recipe)
    fully_shard(model, mesh=one_rank)
    optimizer = torch_bf16.SGD(model.named_parameters(), lr=0.0, recipe=recipe)
    if gathered:
        with torch.no_grad():
            model(torch.ones(1, 4).bfloat16())
    parameters = optimizer.param_groups[0]["params"]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    with mock.patch.object(remainders, "_index", wraps=remainders._index) as index:
        optimizer.step()
    if not gathered:
        assert index.call_count <= 3
    for parameter, weight in zip(parameters, exact, strict=True):
        if parameter.ndim == 1 or recipe == "bf16-fp32-master":
            assert torch.equal(optimizer.exact_weight(parameter).to_local(), weight)
    assert not [each for each in model if each in remainders._by_owner]


def test_parameters_without_one_are_not_each_looked_for_in_all_modules(one_rank):
    """Of a model that was loaded in bf16, but for some parts: 2000 parameters took 15 s."""
    model = nn.Sequential(*[nn.Linear(4, 4).bfloat16() for _ in range(20)], nn.Linear(4, 4))
    exact = model[-1].weight.detach().clone()
    torch_bf16.cast_model(model, "bf16-fp32-master")
    fully_shard(model, mesh=one_rank)
    optimizer = torch_bf16.SGD(model.named_parameters(), lr=0.0, recipe="bf16-fp32-master")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with mock.patch.object(remainders, "_index", wraps=remainders._index) as index:
        optimizer.step()
    assert index.call_count <= 3
    assert torch.equal(optimizer.exact_weight(model[-1].weight).to_local(), exact)
