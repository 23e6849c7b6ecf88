"""Between an evaluation and the next backward pass FSDP2 shows the weights that it has gathered."""

import pytest
import torch
from sharded_models import Case, local, make_model, mesh_of
from sharded_training import adamw
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torch_bf16

EXACT = "bf16-fp32-master"
CASE = Case("fsdp2", (4,))


def evaluated(reshard_after_forward):
    """A sharded model after a forward pass, its optimizer, and its weights in fp32."""
    model = make_model()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch_bf16.cast_model(model, EXACT)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(
        model,
        mesh=mesh_of(CASE),
        mp_policy=policy,
        reshard_after_forward=reshard_after_forward,
    )
    optimizer = adamw(model, EXACT)
    output_of(model)
    return model, optimizer, weights


def output_of(model):
    with torch.no_grad():
        return model(torch.ones(2, CASE.sizes[0], dtype=torch.bfloat16))


def read_and_written(reshard_after_forward):
    model, optimizer, weights = evaluated(reshard_after_forward)
    for name, parameter in zip(weights, optimizer.param_groups[0]["params"], strict=True):
        exact = optimizer.exact_weight(parameter).full_tensor()
        assert torch.equal(exact, weights[name]), name
    shown = optimizer.state_dict()["state"].values()
    assert len(shown) == len(weights)
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.set_exact_weight(parameter, torch.zeros_like(parameter, dtype=torch.float32))
    assert not output_of(model).any()


def averaged(reshard_after_forward):
    model, optimizer, weights = evaluated(reshard_after_forward)
    with torch_bf16.exact_weights(model, optimizer) as found:
        for name, weight in found.items():
            assert torch.equal(weight.full_tensor(), weights[name]), name
            local(weight).zero_()
    assert not output_of(model).any()


@pytest.mark.parametrize("reshard_after_forward", [False, 2])
@pytest.mark.parametrize("function", [read_and_written, averaged], ids=lambda each: each.__name__)
def test_what_an_evaluation_has_gathered_hides_no_exact_weights(
    ranks, function, reshard_after_forward
):
    ranks(CASE.world, function, reshard_after_forward)
