"""Data-parallel runs that accumulate or release gradients; see test_gradients_ranks.py."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_bf16
from torch_bf16 import Recipe
from torch_bf16.numerics.rounding import join16

MICRO_BATCHES = 3
STEPS = 2


def gradient_of(rank, step, number, name, shape):
    """What a micro-batch brings; computed again by whoever checks."""
    generator = torch.Generator().manual_seed(1000 * rank + 100 * step + 10 * number + len(name))
    return torch.randn(shape, generator=generator).bfloat16()


class Model(torch.nn.Module):
    """Two parameters whose gradients are what the input says."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(8, 4).bfloat16())
        self.bb = torch.nn.Parameter(torch.ones(5).bfloat16())

    def forward(self, gradients):
        return sum((p * gradients[name]).sum() for name, p in self.named_parameters())


def micro_batch(model, rank, step, number):
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return {name: gradient_of(rank, step, number, name, s) for name, s in shapes.items()}


def assert_same_everywhere(tensor, ranks):
    everywhere = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(everywhere, tensor)
    assert all(torch.equal(tensor, each) for each in everywhere)


def run_ddp(rank, ranks, format, static, sync_always):
    bare = Model()
    recipe = Recipe("mine", accumulate=format)
    optimizer = torch_bf16.AdamW(list(bare.named_parameters()), lr=0.1, recipe=recipe)
    model = DistributedDataParallel(bare, static_graph=static)
    torch_bf16.accumulate_gradients(model, optimizer)
    for step in range(STEPS):
        expected = {name: 0.0 for name, _ in bare.named_parameters()}
        for number in range(MICRO_BATCHES):
            waits = number + 1 < MICRO_BATCHES and not sync_always
            with model.no_sync() if waits else nullcontext():
                model(micro_batch(bare, rank, step, number)).backward()
            for name, p in bare.named_parameters():
                for each in range(ranks):
                    shape = tuple(p.shape)
                    expected[name] += gradient_of(each, step, number, name, shape).double() / ranks
        for name, p in bare.named_parameters():
            assert p.grad.dtype == (torch.float32 if format == "fp32" else torch.bfloat16)
            assert_same_everywhere(p.grad, ranks)
            # fp32: some roundings to 2^-24 of numbers below 8. bf16: as many to 2^-8.
            unit = 2**-24 if format == "fp32" else 2**-8
            assert (p.grad.double() - expected[name]).abs().max() <= 8 * 10 * unit
        optimizer.step()
        optimizer.zero_grad()
    for p in bare.parameters():
        assert_same_everywhere(p.data, ranks)


def run_no_sync_loses_nothing(rank, ranks, format):
    bare = Model()
    optimizer = torch_bf16.SGD(list(bare.named_parameters()), lr=0.1)
    model = DistributedDataParallel(bare)
    torch_bf16.accumulate_gradients(model, optimizer, format)
    small = {name: torch.full_like(p, 0.001) for name, p in bare.named_parameters()}
    for number in range(1000):
        with model.no_sync() if number < 999 else nullcontext():
            model(small).backward()
    for p in bare.parameters():
        if format == "bf16_nearest":
            assert p.grad.eq(0.5).all()  # the control: what torch does
        else:
            # test_accumulation.py derives the bound for one sum; the mean of ranks is no worse.
            limit = 0.74 if format == "bf16_stochastic" else 1e-3
            assert (p.grad.double() - 0.99945).abs().max() <= limit
            assert (p.grad.double().mean() - 0.99945).abs() <= limit / p.numel() ** 0.5


def run_forward_before_no_sync(rank, ranks):
    """DDP reduces in a pass of two losses if it had prepared for one of them."""
    bare = Model()
    optimizer = torch_bf16.SGD(list(bare.named_parameters()), lr=0.1)
    model = DistributedDataParallel(bare)
    torch_bf16.accumulate_gradients(model, optimizer, "bf16_stochastic")
    with model.no_sync():
        model(micro_batch(bare, rank, 0, 0)).backward()
    first = model(micro_batch(bare, rank, 0, 1))
    with model.no_sync():
        (first + model(micro_batch(bare, rank, 0, 2))).backward()
    for name, p in bare.named_parameters():
        assert_same_everywhere(p.grad, ranks)
        batches = [micro_batch(bare, r, 0, n)[name] for r in range(ranks) for n in range(3)]
        expected = sum(each.double() for each in batches) / ranks
        assert (p.grad.double() - expected).abs().max() <= 8 * 10 * 2**-8


def run_unused(rank, ranks):
    """A parameter that no pass uses, in a bucket with one that every pass does."""
    bare = Model()
    bare.ccc = torch.nn.Parameter(torch.ones(3).bfloat16())
    bare.forward = lambda gradient: (bare.a * gradient).sum()
    optimizer = torch_bf16.SGD(list(bare.named_parameters()), lr=0.1)
    model = DistributedDataParallel(bare, static_graph=True)
    torch_bf16.accumulate_gradients(model, optimizer, "fp32")
    for _ in range(2):
        model(torch.full((8, 4), rank + 2.0**-9)).backward()
        assert bare.bb.grad is None
        assert bare.a.grad.eq((ranks - 1) / 2 + 2.0**-9).all()
        optimizer.step()
        optimizer.zero_grad()


def run_join(rank, ranks):
    """Ranks with fewer batches take part with zeros, until the last one has none."""
    bare = Model()
    optimizer = torch_bf16.SGD(list(bare.named_parameters()), lr=0.1)
    model = DistributedDataParallel(bare)
    torch_bf16.accumulate_gradients(model, optimizer, "fp32")
    with model.join():
        for step in range(1 + rank):
            model(micro_batch(bare, rank, step, 0)).backward()
            expected = sum(
                micro_batch(bare, each, step, 0)["a"].float() for each in range(step, ranks)
            )
            assert torch.equal(bare.a.grad, expected / ranks)
            optimizer.step()
            optimizer.zero_grad()


def run_in_two_groups():
    """Each pair of ranks has the mean of its own gradients."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank, bare = dist.get_rank(), Model()
    pair = rank // 2
    optimizer = torch_bf16.SGD(list(bare.named_parameters()), lr=0.1)
    model = DistributedDataParallel(bare, process_group=groups[pair])
    torch_bf16.accumulate_gradients(model, optimizer, "fp32")
    model(micro_batch(bare, rank, 0, 0)).backward()
    both = [micro_batch(bare, each, 0, 0) for each in (2 * pair, 2 * pair + 1)]
    for name, p in bare.named_parameters():
        assert torch.equal(p.grad, sum(each[name].float() for each in both) / 2)


def run_two_optimizers(rank, ranks):
    """One of two optimizers returns to torch's sums, then the other."""
    bare = Model()
    model = DistributedDataParallel(bare)
    optimizers = [torch_bf16.SGD([named], lr=0.1) for named in bare.named_parameters()]
    handles = [torch_bf16.accumulate_gradients(model, each, "fp32") for each in optimizers]
    gradients = {name: torch.full(p.shape, rank + 2.0**-9) for name, p in bare.named_parameters()}
    mean = torch.tensor((ranks - 1) / 2 + 2.0**-9)
    for removed in range(3):
        for handle in handles[:removed]:
            handle.remove()
        model(gradients).backward()
        found = [p.grad.dtype for p in bare.parameters()]
        assert found == [torch.bfloat16] * removed + [torch.float32] * (2 - removed)
        for p in bare.parameters():
            torch.testing.assert_close(p.grad, mean.to(p.grad.dtype).expand_as(p.grad))
        model.zero_grad()


class Nested(torch.nn.Module):
    """Sharded in two groups: the inner model, and a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.inner = Model()
        self.ccc = torch.nn.Parameter(torch.ones(3, 4).bfloat16())

    def forward(self, gradients):
        inner = {name.removeprefix("inner."): g for name, g in gradients.items()}
        return self.inner(inner) + (self.ccc * gradients["ccc"]).sum()


def sharded():
    model = Nested()
    names = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.inner, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, names


def run_fsdp_loses_nothing(rank, ranks, format, synchronised):
    model, names = sharded()
    optimizer = torch_bf16.SGD(list(model.named_parameters()), lr=0.1)
    torch_bf16.accumulate_gradients(model, optimizer, format)
    large = {name: torch.ones(shape).bfloat16() for name, shape in names}
    small = {name: torch.full(shape, 2.0**-9).bfloat16() for name, shape in names}
    for number in range(101):
        model.set_requires_gradient_sync(synchronised or number == 100)
        model(small if number else large).backward()
    totals = torch.cat([p.grad.to_local().flatten() for p in model.parameters()])
    assert totals.dtype == (torch.float32 if format == "fp32" else torch.bfloat16)
    if torch.__version__ < "2.8":
        totals /= ranks  # gloo's reduce_scatter takes the mean for a sum there
    errors = totals.double() - (1 + 100 * 2.0**-9)
    if not synchronised or format == "fp32":
        # Sums are exact in fp32, which is how FSDP2 keeps them for the first of these.
        assert errors.abs().max() <= (0 if format == "fp32" and synchronised else 2**-8)
    elif format == "bf16_nearest":
        assert totals.eq(1).all()  # the control: what torch does
    else:
        # Each addition has a standard deviation of at most half of 2^-7: six of the mean's.
        assert errors.mean().abs() <= 6 * 10 * 2**-8 / len(errors) ** 0.5


def run_fsdp_two_losses(rank, ranks, format):
    """Two forward passes, then two backward passes: the second must not be added by torch."""
    model, names = sharded()
    optimizer = torch_bf16.SGD(list(model.named_parameters()), lr=0.1)
    torch_bf16.accumulate_gradients(model, optimizer, format)
    # 1 + 2^-8 is a tie, which goes to the even 1 every time when rounded to nearest.
    first = {name: torch.ones(shape).bfloat16() for name, shape in names}
    second = {name: torch.full(shape, 2.0**-9).bfloat16() for name, shape in names}
    moved = 0
    for _ in range(20):
        losses = [model(first), model(second)]
        for loss in losses:
            loss.backward()
        moved += sum(int((p.grad.to_local() > 1).sum()) for p in model.parameters())
        optimizer.zero_grad()
    assert moved > 0


def run_fsdp_refusal(rank, ranks):
    model = Model()
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (ranks,)))
    optimizer = torch_bf16.SGD(list(model.named_parameters()), lr=0.1)
    with pytest.raises(ValueError, match=r"reduce_dtype=torch\.float32"):
        torch_bf16.accumulate_gradients(model, optimizer, "fp32")


def run_refusal(rank, ranks, option):
    bare = Model()
    optimizer = torch_bf16.SGD(list(bare.named_parameters()), lr=0.1)
    model = DistributedDataParallel(bare, **{option: True})
    with pytest.raises(ValueError, match=option):
        torch_bf16.accumulate_gradients(model, optimizer, "fp32")
    two = torch.nn.ModuleList([DistributedDataParallel(Model()) for _ in range(2)])
    with pytest.raises(ValueError, match="several DDP modules; give each an optimizer of its own"):
        torch_bf16.accumulate_gradients(two, torch_bf16.SGD(two.parameters(), lr=0.1), "fp32")
    # What the message offers works.
    torch_bf16.accumulate_gradients(model, optimizer, "bf16_stochastic")
    model(micro_batch(bare, rank, 0, 0)).backward()
    model(micro_batch(bare, rank, 0, 1)).backward()
    optimizer.step()


def run_fsdp_release(rank, ranks, max_norm):
    """The bits of ordinary steps, and no gradient left by the time the next group's arrives."""
    norm = {} if max_norm is None else {"max_norm": max_norm, "norm": "last_step"}
    ends = []
    for release in (False, True):
        model, names = sharded()
        recipe = "bf16-stochastic" if max_norm is None else "bf16-fp32-master"
        optimizer = torch_bf16.AdamW(list(model.named_parameters()), lr=0.1, recipe=recipe)
        handle = last = None
        for step in range(3):
            # The first step of "last_step" is clipped otherwise, see below: alike in both.
            released = release or (max_norm is not None and step == 0)
            if handle is None and released:
                handle = torch_bf16.release_gradients(model, optimizer, **norm)
            gradients = {n: gradient_of(rank, step, 0, n, shape) for n, shape in names}
            model(gradients).backward()
            assert all((p.grad is None) == released for p in model.parameters())
            if not released and max_norm is not None:
                squares = [p.grad.full_tensor().float().square().sum() for p in model.parameters()]
                optimizer.scale_next_step((max_norm / (last + 1e-6)).clamp(max=1.0))
                last = torch.stack(squares).sum().sqrt()
            optimizer.step()
            optimizer.zero_grad()
            if handle is not None and not release:
                last = handle.last_norm
                handle.remove()
                handle = None
        norms = handle.last_norm if release else last
        states = [optimizer.state[p] for p in model.parameters()]
        tensors = [p.detach().to_local() for p in model.parameters()]
        ends.append(tensors + [local(v) for s in states for v in s.values()])
        ends[-1] += [] if norms is None else [norms]
    for one, other in zip(*ends, strict=True):
        if max_norm is None:
            assert torch.equal(one, other)
        else:
            # The norms are summed in another order.
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def run_fsdp_release_by_parameter(rank, ranks, norm):
    """A first step: each whole gradient clipped by its own norm."""
    ends = []
    for release in (False, True):
        model, names = sharded()
        optimizer = torch_bf16.SGD(
            list(model.named_parameters()), lr=0.1, recipe="bf16-fp32-master"
        )
        if release:
            torch_bf16.release_gradients(model, optimizer, max_norm=1.0, norm=norm)
        gradients = {n: gradient_of(rank, 0, 0, n, shape) for n, shape in names}
        model(gradients).backward()
        if not release:
            clipped = 0
            for p in model.parameters():
                size = p.grad.full_tensor().float().norm()
                clipped += int(size > 1)
                others = {q: q.grad for q in model.parameters() if q is not p}
                for q in others:
                    q.grad = None
                optimizer.scale_next_step((1 / (size + 1e-6)).clamp(max=1.0))
                optimizer.step()
                for q, gradient in others.items():
                    q.grad = gradient
                p.grad = None
            assert clipped > 0
        optimizer.step()
        ends.append(
            [
                join16(local(p.detach()), local(optimizer.state[p]["remainder16"]))
                for p in model.parameters()
            ]
        )
    for one, other in zip(*ends, strict=True):
        # A norm of shards is summed in another order than that of the whole.
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


CASES = {
    "ddp-fp32": lambda rank, ranks: run_ddp(rank, ranks, "fp32", False, False),
    "ddp-fp32-static-graph": lambda rank, ranks: run_ddp(rank, ranks, "fp32", True, True),
    "ddp-fp32-reduced-every-time": lambda rank, ranks: run_ddp(rank, ranks, "fp32", False, True),
    "ddp-fp32-unused": run_unused,
    "ddp-fp32-join": run_join,
    "ddp-fp32-two-optimizers": run_two_optimizers,
    "ddp-bf16_stochastic": lambda rank, ranks: run_ddp(
        rank, ranks, "bf16_stochastic", False, False
    ),
    "ddp-bf16_stochastic-forward-before-no-sync": run_forward_before_no_sync,
    "no-sync-fp32": lambda rank, ranks: run_no_sync_loses_nothing(rank, ranks, "fp32"),
    "no-sync-bf16_stochastic": lambda rank, ranks: run_no_sync_loses_nothing(
        rank, ranks, "bf16_stochastic"
    ),
    "no-sync-bf16-control": lambda rank, ranks: run_no_sync_loses_nothing(
        rank, ranks, "bf16_nearest"
    ),
    **{
        f"refused-{option}": functools.partial(run_refusal, option=option)
        for option in ("gradient_as_bucket_view", "find_unused_parameters")
    },
    **{
        f"fsdp2-{format}{'' if synchronised else '-no-sync'}": functools.partial(
            run_fsdp_loses_nothing, format=format, synchronised=synchronised
        )
        for format in ("bf16_nearest", "bf16_stochastic", "fp32")
        for synchronised in (True, False)
    },
    "fsdp2-two-losses-bf16_stochastic": functools.partial(
        run_fsdp_two_losses, format="bf16_stochastic"
    ),
    "fsdp2-two-losses-fp32": functools.partial(run_fsdp_two_losses, format="fp32"),
    "fsdp2-refusal": run_fsdp_refusal,
    "fsdp2-release": functools.partial(run_fsdp_release, max_norm=None),
    "fsdp2-release-clipped": functools.partial(run_fsdp_release, max_norm=2.0),
    **{
        f"fsdp2-release-by-{norm}": functools.partial(run_fsdp_release_by_parameter, norm=norm)
        for norm in ("parameter", "last_step")
    },
}


def run(case):
    CASES[case](dist.get_rank(), dist.get_world_size())
