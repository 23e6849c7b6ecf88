"""A plan over DTensors lasts as one over plain tensors does, and every change of one is seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import torch_bf16
from torch_bf16.sharding import shard_of

BF16, COUNT = torch.bfloat16, 4


def placed(memory, mesh, placement=None):
    return DTensor.from_local(memory, mesh, [placement or Shard(0)], run_check=False)


class Twins:
    """The same run over DTensors, the last parameter but a plain tensor, and over plain tensors."""

    def __init__(self, mesh, recipe="bf16-fp32-master"):
        torch.manual_seed(0)
        self.mesh = mesh
        weights = [torch.randn(8, 6).to(BF16) for _ in range(COUNT)]
        self.plain = [nn.Parameter(each.clone()) for each in weights]
        self.sharded = [nn.Parameter(placed(each, mesh)) for each in weights[:-1]]
        self.sharded.append(nn.Parameter(weights[-1]))
        self.optimizers = [
            torch_bf16.AdamW([(f"{n}", p) for n, p in enumerate(each)], lr=0.01, recipe=recipe)
            for each in (self.plain, self.sharded)
        ]

    @property
    def plan(self):
        return self.optimizers[1]._engine.plan

    def step(self, like=None):
        """A step of both on the same gradients; ``like`` makes the DTensors', else as FSDP2."""
        for plain, sharded in zip(self.plain, self.sharded, strict=True):
            gradient = torch.randn(8, 6).to(BF16)
            plain.grad, sharded.grad = gradient, gradient.clone()
            if isinstance(sharded, DTensor):
                memory = gradient.clone()
                sharded.grad = (
                    DTensor(memory, sharded._spec, requires_grad=False) if like is None
                    else like(memory, self.mesh)
                )  # fmt: skip
        for optimizer in self.optimizers:
            optimizer.step()

    def assert_same(self):
        one, other = self.optimizers
        for plain, sharded in zip(self.plain, self.sharded, strict=True):
            assert torch.equal(plain, memory_of(sharded))
            for key, value in one.state[plain].items():
                assert torch.equal(value, memory_of(other.state[sharded][key])), key


def memory_of(tensor):
    return getattr(tensor, "_local_tensor", tensor)


@pytest.fixture
def twins(one_rank):
    made = Twins(one_rank)
    for _ in range(3):
        made.step()
    return made


def test_a_plan_over_dtensors_outlives_new_gradients_and_sees_them_at_once(twins):
    plan, watch = twins.plan, twins.plan._guard
    twins.step()
    assert twins.plan is plan
    assert plan._guard is watch
    twins.assert_same()


def asynchronous(memory, mesh):
    gradient = placed(memory, mesh)
    gradient._local_tensor = AsyncCollectiveTensor(memory)
    return gradient


def columns(memory, mesh):
    return placed(memory.t().contiguous().t(), mesh)


def negated(memory, mesh):
    return placed(torch._neg_view(-memory), mesh)


LIKE = {
    "a spec of its own": placed,
    "partial sums": lambda memory, mesh: placed(memory, mesh, Partial()),
    "whole": lambda memory, mesh: placed(memory, mesh, Replicate()),
    "still under way": asynchronous,
    "strided": columns,
    "negated": negated,
}


@pytest.mark.parametrize("like", LIKE.values(), ids=LIKE.keys())
def test_gradients_of_any_kind_may_come_at_any_step(twins, like):
    for each in (None, like, like, None, like):
        twins.step(each)
        twins.assert_same()


def replace_local(twins, parameter):
    parameter._local_tensor = parameter._local_tensor.clone()


def move_memory(twins, parameter):
    parameter._local_tensor.data = parameter._local_tensor.clone()


def replace_state(twins, parameter):
    state = twins.optimizers[1].state[parameter]
    state["exp_avg"] = placed(state["exp_avg"]._local_tensor.clone(), twins.mesh)


def replace_local_state(twins, parameter):
    state = twins.optimizers[1].state[parameter]["exp_avg"]
    state._local_tensor = state._local_tensor.clone()


def move_state(twins, parameter):
    memory = twins.optimizers[1].state[parameter]["exp_avg_sq"]._local_tensor
    memory.data = memory.clone()


def place_otherwise(twins, parameter):
    parameter._spec = placed(parameter._local_tensor, twins.mesh, Replicate())._spec


CHANGES = [
    replace_local, move_memory, replace_state, replace_local_state, move_state, place_otherwise,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_tensors_is_seen_by_the_next_step(twins, change):
    plan, parameter = twins.plan, twins.sharded[1]
    change(twins, parameter)
    # Memory of another version counts as written; here the numbers are the same.
    twins.optimizers[1]._engine.snapshots[parameter].version = shard_of(parameter).version()
    twins.step()
    assert twins.plan is not plan
    twins.assert_same()


@pytest.mark.parametrize("memory", [False, True], ids=["through the DTensor", "in its shard"])
def test_a_weight_written_from_outside_loses_its_lower_half(twins, memory):
    with torch.no_grad():
        twins.plain[1].mul_(0.5)
        (memory_of(twins.sharded[1]) if memory else twins.sharded[1]).mul_(0.5)
    for _ in range(2):
        twins.step()
        twins.assert_same()


def test_gradients_are_not_kept_alive_by_the_plan(twins):
    import weakref

    twins.step()
    alive = weakref.ref(twins.sharded[0].grad)
    for each in twins.sharded:
        each.grad = None
    assert alive() is None


def test_a_plain_gradient_of_a_dtensor_is_refused_and_nothing_is_updated(twins):
    before = memory_of(twins.sharded[0]).clone()
    with pytest.raises(ValueError, match="is a DTensor and has a gradient that is a plain tensor"):
        twins.step(lambda memory, mesh: memory)
    assert torch.equal(memory_of(twins.sharded[0]), before)


def test_states_of_a_replicated_weight_show_the_order_in_which_they_lie(one_rank):
    """DTensor decides by it whether flatten() can be a view."""
    memory = torch.randn(6, 5, 3, 3).to(BF16, memory_format=torch.channels_last)
    weight = nn.Parameter(placed(memory, one_rank, Replicate()))
    optimizer = torch_bf16.AdamW([("w", weight)], lr=0.01, recipe="bf16-fp32-master")
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    for key, state in optimizer.state[weight].items():
        if key != "step":
            assert state.stride() == state.to_local().stride() == memory.stride()
            assert torch.equal(state.flatten().to_local(), state.to_local().flatten())
