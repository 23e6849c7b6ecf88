"""States of shards in host memory: the bits of one process, and of states beside the shards."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from sharded_models import UNEVEN, WIDE, Case
from sharded_training import STEPS, Run, adamw, assert_same, joined, reference
from slow_bus import ORDERS, use
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import torch_bf16
from torch_bf16.optim.attach import _check_optimizer
from torch_bf16.sharding import local
from torch_bf16.sharding.fsdp1 import Fsdp1Shard
from torch_bf16.sharding.local import place_like, whole

CASES = [
    (Case("ddp", (2,)), "bf16-stochastic"),
    (Case("fsdp2", (2,)), "bf16-fp32-master"),
    (Case("fsdp2", (3,), UNEVEN), "bf16-stochastic"),
    (Case("fsdp2-columns", (2,), WIDE), "bytes"),
    (Case("hsdp", (2, 2), UNEVEN), "bf16-fp32-master"),
    (Case("tp", (2,), WIDE), "bytes"),
    (Case("fsdp2+tp", (2, 2), WIDE), "bytes"),
]
each_case = pytest.mark.parametrize(
    ("case", "recipe"), CASES, ids=[case.id(recipe, "eager") for case, recipe in CASES]
)


def on_host(model, recipe):
    return adamw(model, dataclasses.replace(recipe, offload="states"))


def trained(case, recipe):
    with pytest.MonkeyPatch.context() as patch:
        bus = use(patch, ORDERS[1])
        run = Run(case, recipe, on_host).train()
        kept = [
            local(each)
            for state in run.optimizer.state.values()
            for key, each in state.items()
            if key != "step"
        ]
        assert all(bus.holds(each) for each in kept if each.numel())
        assert "down" in bus.log
        return run.parts()


@each_case
def test_weights_and_states_equal_one_process(ranks, case, recipe):
    found = ranks(case.world, trained, case, recipe)
    assert_same(reference(case.sizes, recipe), joined(found))


def saved_and_resumed(case, recipe, before, after, folder):
    with pytest.MonkeyPatch.context() as patch:
        use(patch)
        Run(case, recipe, before).train(range(STEPS // 2)).save(folder)
        run = Run(case, recipe, after).load(folder).train(range(STEPS // 2, STEPS))
        return run.parts()


@pytest.mark.parametrize("makers", [(on_host, adamw), (adamw, on_host)], ids=["down", "up"])
def test_a_sharded_checkpoint_is_resumed_under_either_place(ranks, makers, tmp_path):
    case, recipe = Case("fsdp2", (2,), WIDE), "bytes"
    found = ranks(2, saved_and_resumed, case, recipe, *makers, tmp_path)
    assert_same(reference(case.sizes, recipe), joined(found))


def under_a_policy():
    found = []
    for recipe in ("bf16-fp32-master", torch_bf16.get_recipe("bf16-fp32-master", offload="states")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
        torch_bf16.cast_model(model, recipe)
        fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
        optimizer = torch_bf16.AdamW(model.named_parameters(), lr=0.01, recipe=recipe)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed + 10 * dist.get_rank())
            model(torch.randn(4, 64, generator=generator).bfloat16()).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        states = [local(each) for p in model.parameters() for each in optimizer.state[p].values()]
        found.append([*map(local, model.parameters()), *states])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_under_cpu_offload_policy_parameters_are_on_the_host_and_states_beside_them(ranks):
    ranks(2, under_a_policy)


def test_a_state_beside_a_mesh_of_other_devices_stays_in_host_memory(one_rank, monkeypatch):
    weight = DTensor.from_local(torch.ones(6, 4), one_rank, run_check=False)
    memory = torch.randn(6, 4)
    expected = place_like(weight, memory)
    # As a mesh of GPUs has it: from_local would move the memory there.
    with monkeypatch.context() as patch:
        # A property of newer torch reads the first, and older torch has the second alone.
        name = "_device_type" if hasattr(one_rank, "_device_type") else "device_type"
        patch.setattr(one_rank, name, "cuda")
        found = place_like(weight, memory)
    assert local(found) is memory
    assert found.device == memory.device
    assert (found.placements, found.shape, found.stride(), found.dtype) == (
        *(expected.placements, expected.shape, expected.stride()),
        torch.float32,
    )
    assert torch.equal(whole(found), memory)
    scales = place_like(weight, torch.ones(6, 1), (6, 1))
    assert scales.shape == (6, 1)


def test_what_offloads_by_its_own_means_is_named(monkeypatch):
    recipe = torch_bf16.get_recipe("bf16-fp32-master", offload="states")
    optimizer = torch_bf16.AdamW([nn.Parameter(torch.ones(3).bfloat16())], recipe=recipe)
    with pytest.raises(NotImplementedError, match=r"zero_optimization.offload_optimizer"):
        _check_optimizer(optimizer)
    use(monkeypatch)
    monkeypatch.setattr("torch_bf16.optim.planning.shard_of", lambda p, name="": Flattened(p, name))
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3).bfloat16()
    with pytest.raises(NotImplementedError, match=r"FSDP1.* Shard with fully_shard"):
        optimizer.step()


class Flattened(type(torch_bf16.sharding.shard_of(torch.ones(1)))):
    offload_obstacle = Fsdp1Shard.offload_obstacle
