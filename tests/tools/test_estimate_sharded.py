"""Sharded rows of an estimate against ranks that have taken real steps under fully_shard."""

import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from estimated_models import ROWS, Stack, allocated
from ranks import Ranks
from sharded_models import local
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torch_bf16
from torch_bf16.tools.estimate.memory import memory
from torch_bf16.tools.estimate.optimizers import optimizer_spec
from torch_bf16.tools.estimate.shapes import shapes_of
from torch_bf16.tools.estimate.sharded import traffic

TOLERANCE = 0.01
RANKED = [
    *("32-true", "bf16-mixed", "bf16-true", "bf16-stochastic", "bf16-fp32-master"),
    "bf16+8 / int8 / int8",
    "bf16-stochastic, wire",
]
BIG = {"width": 256, "layers": 6, "words": 1000}


def precision_of(label):
    """The precision of a row; ``..., wire`` sends gradients in bf16."""
    name, wire, _ = label.partition(", wire")
    found = ROWS[name]
    if not wire:
        return found
    return replace(found, recipe=torch_bf16.get_recipe(found.recipe, reduce="bf16_wire"))


def sharded(label, **sizes):
    """A model and its optimizer, sharded over all ranks."""
    precision = precision_of(label)
    model = Stack(**sizes)
    if precision.recipe:
        torch_bf16.cast_model(model, precision.recipe)
    elif not precision.autocast:
        model = model.to(precision.dtype)
    low = None if label == "32-true" else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    library = torch_bf16 if precision.recipe else torch.optim
    ours = {"recipe": precision.recipe, "backend": "eager"}
    options = ours if precision.recipe else {"foreach": True}
    optimizer = library.AdamW(model.parameters(), lr=1e-3, **options)
    if precision.recipe and precision.recipe.reduce == "bf16_wire":
        torch_bf16.reduce_gradients(model, optimizer)
    return model, optimizer


class Sent(TorchDispatchMode):
    """Bytes that this rank sends in the collectives of FSDP2."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        place = {"c10d::_allgather_base_": 1, "c10d::_reduce_scatter_base_": 0}.get(func.name())
        world = dist.get_world_size()
        if place is not None:
            self.bytes += args[place].nbytes * (world - 1)
        if func.name() == "c10d::alltoall_base_":
            self.bytes += args[1].nbytes * (world - 1) // world
        return func(*args, **(kwargs or {}))


class AllBytes(TorchDispatchMode):
    """The most bytes at once; FSDP2 frees memory by resizing what lives on."""

    def __init__(self):
        super().__init__()
        self.known, self.peak, self.counting = weakref.WeakSet(), 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves((result, args, kwargs)):
            if isinstance(each, torch.Tensor):
                self.known.add(local(each).untyped_storage())
        if self.counting:
            self.peak = max(self.peak, sum(each.nbytes() for each in list(self.known)))
        return result


def held_and_sent(label):
    model, optimizer = sharded(label)
    tokens = torch.randint(0, 300, (2, 4))
    for _ in range(2):
        with Sent() as sent:
            model(tokens).float().square().mean().backward()
        optimizer.step()
        real = allocated(model, optimizer)
        optimizer.zero_grad()
    return real, sent.bytes


def peak_of_backward(label):
    with AllBytes() as found:
        model, optimizer = sharded(label, **BIG)
        for number in range(2):
            # The first pass makes what FSDP2 keeps.
            found.counting = number == 1
            model(torch.zeros(1, 1, dtype=torch.long)).float().square().mean().backward()
            found.counting = False
            optimizer.step()
            optimizer.zero_grad()
    return found.peak


def buckets_of_a_replica(label):
    """Bytes of DDP's buckets, and of the gradients that share no memory with them."""
    precision, model = precision_of(label), Stack()
    if precision.recipe:
        torch_bf16.cast_model(model, precision.recipe)
    replica, buckets = DistributedDataParallel(model), {}

    def reduce(group, bucket):
        buckets[bucket.buffer().data_ptr()] = bucket.buffer().nbytes
        return allreduce_hook(group, bucket)

    replica.register_comm_hook(None, reduce)
    for _ in range(2):
        # DDP makes them anew after the first pass.
        buckets.clear()
        replica(torch.randint(0, 300, (2, 4))).float().square().mean().backward()
    storages = {each.grad.untyped_storage().data_ptr() for each in model.parameters()}
    beside = sum(each.grad.nbytes for each in model.parameters())
    return sum(buckets.values()), beside if storages.isdisjoint(buckets) else 0


@pytest.mark.parametrize("label", ["32-true", "bf16-stochastic"])
def test_buckets_of_ddp_are_a_copy_of_all_gradients(ranks: Ranks, label):
    found = memory(shapes_of(Stack(), "Stack"), precision_of(label), optimizer_spec("AdamW"))
    for buckets, gradients in ranks(2, buckets_of_a_replica, label):
        assert (found.buckets, found.gradients) == (buckets, gradients)
    with torch.device("meta"):
        shapes = shapes_of(Stack(width=1024, layers=12), "Stack")
    released = replace(precision_of(label), released=True)
    found = memory(shapes, released, optimizer_spec("AdamW"))
    kept = memory(shapes, precision_of(label), optimizer_spec("AdamW"))
    assert found.gradients < found.buckets == kept.gradients


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("label", RANKED)
def test_a_row_has_the_bytes_that_each_rank_holds_and_sends(ranks: Ranks, label, world):
    shapes, precision = shapes_of(Stack(), "Stack"), precision_of(label)
    optimizer = optimizer_spec("AdamW")
    for rank, (real, sent) in enumerate(ranks(world, held_and_sent, label)):
        found = memory(shapes, precision, optimizer, world, rank)
        for role, size in real.items():
            assert getattr(found, role) == pytest.approx(size, rel=TOLERANCE), (rank, role)
        estimated = traffic(shapes, precision, optimizer, world).sent
        assert estimated == pytest.approx(sent, rel=TOLERANCE)


@pytest.mark.parametrize(
    "label", ["32-true", "bf16-stochastic", "bf16-stochastic, wire", "bf16-fp32-master"]
)
def test_the_peak_of_a_rank_is_that_of_a_backward_pass(ranks: Ranks, label):
    """A tenth too much at most: where weights and reduction share a dtype, less lives at once."""
    shapes, precision = shapes_of(Stack(**BIG), "Stack"), precision_of(label)
    (real, _) = ranks(2, peak_of_backward, label)
    found = memory(shapes, precision, optimizer_spec("AdamW"), 2)
    sent = traffic(shapes, precision, optimizer_spec("AdamW"), 2)
    estimated = found.held + sent.gathered + sent.reduced
    assert 0.99 * real <= estimated <= 1.1 * real
