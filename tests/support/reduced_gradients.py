"""Ranks that reduce gradients with bf16 on the wire; see tests/gradients/test_reduction.py."""

import copy
import time
from contextlib import nullcontext
from unittest import mock

import numpy as np
import oracle
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import torch_bf16

SEED = 5


class Model(torch.nn.Module):
    """Parameters whose gradients are what the input says; one is fp32, and one can be unused."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(33, 7).bfloat16())
        self.bias = torch.nn.Parameter(torch.ones(5).bfloat16())
        self.exact = torch.nn.Parameter(torch.ones(6))
        self.seldom = torch.nn.Parameter(torch.ones(3, 3).bfloat16())
        self.wide = torch.nn.Parameter(torch.ones(64, 9).bfloat16())

    def forward(self, gradients):
        found = dict(self.named_parameters())
        return sum((found[name] * each).sum() for name, each in gradients.items())


def gradients(rank, step, number=0, without=()):
    """What a micro-batch brings on a rank, of any size; computed again by whoever checks."""
    generator = torch.Generator().manual_seed(1000 * rank + 100 * step + number)
    found = {}
    for name, parameter in Model().named_parameters():
        each = torch.randn(parameter.shape, generator=generator)
        each *= torch.exp2(torch.randint(-9, 9, each.shape, generator=generator))
        found[name] = each.to(parameter.dtype)
    return {name: each for name, each in found.items() if name not in without}


def bits(tensor):
    return tensor.detach().contiguous().view(torch.int16).numpy().view(np.uint16)


def mean(name, ranks, step, number=0, count=1):
    """The bits that DDP's mean must have after ``step - 1`` steps."""
    parts = [bits(gradients(rank, step, number)[name]) for rank in ranks]
    return oracle.mean_of_ranks(parts, SEED, name, step, count)


def optimizer_of(model, **options):
    recipe = torch_bf16.Recipe("mine", seed=SEED, reduce="bf16_wire", **options)
    named = [(name.removeprefix("module."), p) for name, p in model.named_parameters()]
    return torch_bf16.AdamW(named, lr=0.01, recipe=recipe)


class Sent(TorchDispatchMode):
    """Bytes that this rank sends, by collective; what it keeps for itself is not counted."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks, self.bytes = ranks, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, others = func.name().removeprefix("c10d::"), self.ranks - 1
        if name == "alltoall_base_":
            self._count(name, args[1].nbytes * others // self.ranks)
        elif name == "_allgather_base_":
            self._count(name, args[1].nbytes * others)
        elif name == "_reduce_scatter_base_":
            self._count(name, args[0].nbytes * others)
        elif name == "allreduce_":
            # As a ring sends them.
            self._count(name, 2 * args[0][0].nbytes * others // self.ranks)
        return func(*args, **(kwargs or {}))

    def _count(self, name, size):
        self.bytes[name] = self.bytes.get(name, 0) + size


DDP = {
    "one-bucket": {},
    "small-buckets": {"bucket_cap_mb": 1e-4},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 5e-4},
    "static-graph": {"static_graph": True, "bucket_cap_mb": 5e-4},
    "unused": {"find_unused_parameters": True, "bucket_cap_mb": 5e-4},
    "transposed": {"bucket_cap_mb": 5e-4},
}


def run_ddp(group=None, members=None):
    """Every option of DDP gives the oracle's bits, whatever the timing."""
    members = list(range(dist.get_world_size())) if members is None else members
    rank = dist.get_rank()
    for option, options in DDP.items():
        module = Model()
        if option == "transposed":
            module.wide.data = module.wide.data.t().contiguous().t()
        model = DistributedDataParallel(module, process_group=group, **options)
        optimizer = optimizer_of(model)
        torch_bf16.reduce_gradients(model, optimizer)
        for step in (1, 2, 3):
            # One that comes late draws for the step that all others are at.
            without = ("seldom",) if option == "unused" and step < 3 else ()
            loss = model(gradients(rank, step, without=without))
            time.sleep(0.004 * ((rank + step) % len(members)))
            loss.backward()
            for name, p in model.module.named_parameters():
                if name in without:
                    assert p.grad is None
                elif p.dtype == torch.float32:
                    parts = [gradients(each, step)[name] for each in members]
                    torch.testing.assert_close(p.grad, torch.stack(parts).mean(0))
                else:
                    np.testing.assert_array_equal(bits(p.grad), mean(name, members, step), option)
            torch_bf16.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        check_replicas(model, group)


def check_replicas(model, group=None):
    for p in model.parameters():
        found = [torch.empty_like(p.data) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, p.data, group=group)
        assert all(torch.equal(found[0], each) for each in found)


def run_ddp_in_two_groups():
    """Each pair of ranks is reduced by itself, in its own order."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    run_ddp(groups[mine], [2 * mine, 2 * mine + 1])


def run_sent_by_ddp():
    """As many bytes as DDP's own ring in bf16: half of those of fp32 gradients."""
    ranks, found = dist.get_world_size(), []
    for wire in (False, True):
        model = DistributedDataParallel(torch.nn.Linear(96, 50).bfloat16())
        optimizer = torch_bf16.AdamW(model.parameters(), lr=0.01)
        if wire:
            torch_bf16.reduce_gradients(model, optimizer)
        loss = model(torch.ones(2, 96).bfloat16()).sum()
        with Sent(ranks) as sent:
            loss.backward()
        found.append(sent.bytes)
    return found


def run_micro_batches(accumulate, sync_always):
    """Sums of micro-batches in every format that a rank can hold; the last pass reduces."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    model = DistributedDataParallel(Model(), bucket_cap_mb=5e-4)
    optimizer = optimizer_of(model, accumulate=accumulate)
    torch_bf16.accumulate_gradients(model, optimizer)
    torch_bf16.reduce_gradients(model, optimizer)
    for step in (1, 2):
        local = {}
        for number in range(3):
            with nullcontext() if sync_always or number == 2 else model.no_sync():
                model(gradients(rank, step, number)).backward()
            if number == 1 and not sync_always:
                local = {n: p.grad.clone() for n, p in model.module.named_parameters()}
        if accumulate == "bf16_nearest" and not sync_always:
            for name, p in model.module.named_parameters():
                if p.dtype == torch.bfloat16:
                    mine = local[name] + gradients(rank, step, 2)[name]
                    parts = [torch.empty_like(mine) for _ in ranks]
                    dist.all_gather(parts, mine)
                    expected = oracle.mean_of_ranks([*map(bits, parts)], SEED, name, step, 1)
                    np.testing.assert_array_equal(bits(p.grad), expected)
        optimizer.step()
        optimizer.zero_grad()
    check_replicas(model)


def run_second_reduction():
    """Another reduction for the same step, here of gradients that were thrown away, draws anew."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    model = DistributedDataParallel(Model())
    optimizer = optimizer_of(model)
    torch_bf16.reduce_gradients(model, optimizer)
    for step, count in ((1, 1), (1, 2), (1, 3)):
        model(gradients(rank, step)).backward()
        grad = model.module.wide.grad
        np.testing.assert_array_equal(bits(grad), mean("wide", ranks, step, count=count))
        optimizer.zero_grad()


def run_resume():
    """A resumed run has the bits of one that was not interrupted."""

    def made():
        model = DistributedDataParallel(Model(), bucket_cap_mb=5e-4)
        optimizer = optimizer_of(model)
        torch_bf16.reduce_gradients(model, optimizer)
        return model, optimizer

    def run(model, optimizer, steps):
        for step in steps:
            for number in range(2):
                model(gradients(dist.get_rank(), step, number)).backward()
            torch_bf16.clip_next_step(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = made()
    run(model, optimizer, (1, 2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed, other = made()
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    for each in ((model, optimizer), (resumed, other)):
        run(*each, (3, 4))
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))
    # One that goes back forgets the passes after what it goes back to.
    model(gradients(dist.get_rank(), 5)).backward()
    optimizer.zero_grad()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    end = [p.detach().clone() for p in resumed.parameters()]
    run(model, optimizer, (3, 4))
    assert all(map(torch.equal, model.parameters(), end))


def run_two_optimizers():
    """Each parameter's noise follows the optimizer that has it, of two the last one."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    model = DistributedDataParallel(Model())
    named = list(model.module.named_parameters())
    recipes = [torch_bf16.Recipe("mine", seed=SEED), torch_bf16.Recipe("other", seed=77)]
    optimizers = [
        torch_bf16.AdamW(each, lr=0.01, recipe=recipe)
        for each, recipe in zip((named, named[3:]), recipes, strict=True)
    ]
    for optimizer in optimizers:
        torch_bf16.reduce_gradients(model, optimizer)
        torch_bf16.reduce_gradients(model, optimizer)
    steps = [1, 1]
    for turn in range(3):
        model(gradients(rank, 9)).backward()
        for name, seed, step in (("a", SEED, steps[0]), ("wide", 77, steps[1])):
            parts = [bits(gradients(each, 9)[name]) for each in ranks]
            count = turn + 1 if step == 1 and name == "wide" else 1
            expected = oracle.mean_of_ranks(parts, seed, name, step, count)
            np.testing.assert_array_equal(bits(model.module.get_parameter(name).grad), expected)
        optimizers[0].step()
        steps[0] += 1
        model.zero_grad()


def run_backends():
    """Every backend rounds alike."""
    found = []
    for backend in ("cpu", "eager"):
        model = DistributedDataParallel(Model())
        optimizer = optimizer_of(model, backend=backend)
        torch_bf16.reduce_gradients(model, optimizer)
        model(gradients(dist.get_rank(), 1)).backward()
        found.append(bits(model.module.wide.grad))
    np.testing.assert_array_equal(*found)


def run_launched():
    """As NCCL has it, whose futures are done once the work is launched."""
    exchange = dist.all_to_all_single

    def launched(*tensors, group=None, async_op=False):
        exchange(*tensors, group=group)
        future = torch.futures.Future()
        future.set_result([tensors[0]])
        future.wait = None  # must not be waited for
        return mock.Mock(get_future=lambda: future)

    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    with mock.patch.object(dist, "all_to_all_single", launched):
        model = DistributedDataParallel(Model(), bucket_cap_mb=5e-4)
        optimizer = optimizer_of(model)
        torch_bf16.reduce_gradients(model, optimizer)
        model(gradients(rank, 1)).backward()
    for name in ("a", "wide"):
        found = model.module.get_parameter(name).grad
        np.testing.assert_array_equal(bits(found), mean(name, ranks, 1))


def run_alone():
    """One rank has nothing to round."""
    model = DistributedDataParallel(Model())
    torch_bf16.reduce_gradients(model, optimizer_of(model))
    model(gradients(0, 1)).backward()
    assert torch.equal(model.module.wide.grad, gradients(0, 1)["wide"])
