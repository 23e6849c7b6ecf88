"""Released steps under DDP and HSDP; see test_release_ranks.py."""

import copy
import functools
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_bf16
from torch_bf16 import errors, get_recipe
from torch_bf16.gradients import released_buckets

STEPS = 3
CLIPPED = {"max_norm": 0.05, "norm": "last_step"}


class Model(nn.Module):
    """Four layers, one of them in fp32, and a weight that two modules share."""

    def __init__(self, recipe="bf16-stochastic", keep_fp32=("layers.1",)):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        torch_bf16.cast_model(self, get_recipe(recipe, keep_fp32=keep_fp32))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)) + x
        return x


def backward(model, rank, step, number=0, of=1):
    torch.manual_seed(1000 * rank + 10 * step + number)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(6, 24)).float().square().mean() / of
    loss.backward()


def wrapped(bare, **options):
    # Small buckets: several of them, the first ones reduced before the last gradients are there.
    return DistributedDataParallel(bare, bucket_cap_mb=0.003, **options)


def ends(model, optimizer):
    found = [p.detach().clone() for p in model.parameters()]
    # Released steps make states in another order.
    for _, each in sorted(optimizer.state_dict()["state"].items()):
        found += [v.clone() for v in each.values() if isinstance(v, torch.Tensor)]
    found = [each.to_local() if hasattr(each, "to_local") else each for each in found]
    # Remainders are shown as bf16, where bits may be those of no number; gloo sends no int16.
    return [e.view(torch.int16).int() if e.dtype == torch.bfloat16 else e for e in found]


def alike(found, ranks):
    """Whether all ranks hold the same bits."""
    for each in found:
        theirs = [torch.empty_like(each) for _ in range(ranks)]
        dist.all_gather(theirs, each.contiguous())
        assert all(torch.equal(each, other) for other in theirs), each.shape


def equal(one, other):
    assert len(one) == len(other)
    differing = [n for n, pair in enumerate(zip(one, other, strict=True)) if not torch.equal(*pair)]
    assert not differing, differing


def stepped_early(release):
    """Notes whether steps were taken before the pass was over, of buckets that are waited for."""
    released_buckets.Bucket.done = lambda bucket: bucket._future.wait() is not None
    seen = []
    original = release._take_buckets

    def take(running, *, all_of_them=False):
        before = len(running.emptied)
        original(running, all_of_them=all_of_them)
        seen.append((all_of_them, len(running.emptied) - before))

    release._take_buckets = take
    return seen


def run_ddp(rank, ranks, *, view=False, wire=False, passes=1, no_sync=False, options=None):
    """The bits of ordinary steps on every rank, and no gradient after a pass that steps."""
    recipe = get_recipe("bf16-stochastic", accumulate="bf16_stochastic")
    results = []
    for release in (False, True):
        bare = Model(recipe)
        optimizer = torch_bf16.AdamW(bare.named_parameters(), lr=0.01, recipe=recipe)
        model = wrapped(bare, gradient_as_bucket_view=view)
        if wire:
            torch_bf16.reduce_gradients(model, optimizer)
        torch_bf16.accumulate_gradients(model, optimizer)
        seen = []
        if release:
            steps = 1 if no_sync else passes
            given = {"accumulation_steps": steps, **(options or {})}
            seen = stepped_early(torch_bf16.release_gradients(model, optimizer, **given))
        for step in range(STEPS):
            for number in range(passes):
                last = number + 1 == passes
                with model.no_sync() if no_sync and not last else nullcontext():
                    backward(model, rank, step, number, passes)
                gone = all(p.grad is None for p in bare.parameters())
                assert gone == (release and last)
            optimizer.step()
            optimizer.zero_grad()
        if release:
            # Not all of them at the end.
            assert ranks == 1 or any(taken for at_end, taken in seen if not at_end)
            assert sum(taken for _, taken in seen) == STEPS * len([*bare.parameters()])
        results.append(ends(bare, optimizer))
        alike(results[-1], ranks)
    equal(*results)


def run_default_reduction(rank, ranks, *, columns=False):
    """The bits of DDP without any hook of ours, of three ranks as well."""
    results = []
    for release in (False, True):
        bare = Model()
        if columns:
            # Not contiguous, and without gaps, as convolutions are in channels_last.
            weight = bare.layers[2].weight
            weight.data = weight.data.t().contiguous().t()
        optimizer = torch_bf16.AdamW(bare.named_parameters(), lr=0.01)
        model = wrapped(bare)
        if release:
            torch_bf16.release_gradients(model, optimizer)
        for step in range(STEPS):
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        results.append(ends(bare, optimizer))
    equal(*results)


def run_resume(rank, ranks):
    """Clipping by the last step's norm goes on from a file, under DDP, with the same bits.

    DDP's own sums in bf16 follow from its buckets, which a new process orders in another way.
    """

    def made():
        bare = Model(keep_fp32=())
        optimizer = torch_bf16.AdamW(bare.named_parameters(), lr=0.01)
        model = wrapped(bare, gradient_as_bucket_view=True)
        torch_bf16.reduce_gradients(model, optimizer)
        torch_bf16.release_gradients(model, optimizer, **CLIPPED)
        return bare, model, optimizer

    def train(model, optimizer, steps):
        for step in steps:
            backward(model, rank, step)
            optimizer.step()

    whole, half, resumed = made(), made(), made()
    train(*whole[1:], range(6))
    train(*half[1:], range(3))
    resumed[0].load_state_dict(copy.deepcopy(half[0].state_dict()))
    resumed[2].load_state_dict(copy.deepcopy(half[2].state_dict()))
    train(*resumed[1:], range(3, 6))
    equal(ends(whole[0], whole[2]), ends(resumed[0], resumed[2]))
    alike(ends(whole[0], whole[2]), ranks)


def run_ordinary(rank, ranks, *, case):
    """Where no bucket can be waited for, ``step()`` takes the steps, and says so once."""
    results = []
    options = {"unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}
    errors._said.clear()
    for release in (False, True):
        bare = Model()
        given = release and {"max_norm": None} if case == "constructor" else False
        optimizer = torch_bf16.AdamW(bare.named_parameters(), lr=0.01, release=given)
        model = wrapped(bare, **options.get(case, {}))
        if case == "hook":
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if release and case != "constructor":
                torch_bf16.release_gradients(model, optimizer)
            for step in range(STEPS):
                backward(model, rank, step)
                assert all(p.grad is not None for p in bare.parameters())
                optimizer.step()
                assert all((p.grad is None) == release for p in bare.parameters())
                optimizer.zero_grad()
        messages = [str(each.message) for each in caught if "are released" in str(each.message)]
        assert len(messages) == release
        results.append(ends(bare, optimizer))
        alike(results[-1], ranks)
    equal(*results)


def run_wrapped_later(rank, ranks):
    """DDP around a module that is released already."""
    results = []
    for release in (False, True):
        bare = Model()
        optimizer = torch_bf16.AdamW(bare.named_parameters(), lr=0.01)
        if release:
            torch_bf16.release_gradients(bare, optimizer)
        model = wrapped(bare, gradient_as_bucket_view=True)
        for step in range(STEPS):
            backward(model, rank, step)
            assert all((p.grad is None) == release for p in bare.parameters())
            optimizer.step()
            optimizer.zero_grad()
        results.append(ends(bare, optimizer))
    equal(*results)


def run_removed(rank, ranks):
    """DDP goes on by itself after ``remove()``."""
    results = []
    for release in (False, True):
        bare = Model()
        optimizer = torch_bf16.AdamW(bare.named_parameters(), lr=0.01)
        model = wrapped(bare)
        handle = torch_bf16.release_gradients(model, optimizer) if release else None
        for step in range(STEPS):
            if handle is not None and step == 1:
                handle.remove()
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        results.append(ends(bare, optimizer))
    equal(*results)


def run_two_optimizers(rank, ranks):
    """One module, a bucket of which belongs to a released and to an ordinary optimizer."""
    results = []
    for release in (False, True):
        bare = Model()
        named = dict(bare.named_parameters())
        one = torch_bf16.AdamW([*named.items()][::2], lr=0.01)
        other = torch_bf16.SGD([*named.items()][1::2], lr=0.01)
        model = DistributedDataParallel(bare)
        if release:
            torch_bf16.release_gradients(model, one)
        for step in range(STEPS):
            backward(model, rank, step)
            for optimizer in (one, other):
                optimizer.step()
                optimizer.zero_grad()
        results.append(ends(bare, one) + ends(bare, other))
    equal(*results)


def run_sharded(rank, ranks, *, mesh, passes=1, synchronised=True):
    """FSDP2 and HSDP with ``release`` in the constructor, which needs no module."""
    recipe = get_recipe("bf16-stochastic", accumulate="bf16_stochastic")
    results = []
    names = ("replicate", "shard")[-len(mesh) :]
    for release in (False, True):
        bare = Model(recipe)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        options = {"mesh": init_device_mesh("cpu", mesh, mesh_dim_names=names), "mp_policy": policy}
        bare.layers[0].weight = nn.Parameter(bare.layers[0].weight.detach().clone())
        for layer in bare.layers:
            layer.float() if layer is bare.layers[1] else None
            fully_shard(layer, **options)
        fully_shard(bare, **options)
        given = {"max_norm": None, "accumulation_steps": passes if synchronised else 1}
        optimizer = torch_bf16.AdamW(
            bare.named_parameters(), lr=0.01, recipe=recipe, release=release and given
        )
        for step in range(STEPS):
            for number in range(passes):
                last = number + 1 == passes
                bare.set_requires_gradient_sync(synchronised or last)
                backward(bare, rank, step, number, passes)
                if last:
                    assert all((p.grad is None) == release for p in bare.parameters())
            optimizer.step()
            optimizer.zero_grad()
        results.append(ends(bare, optimizer))
    equal(*results)


def run_second_pass_is_refused(rank, ranks):
    bare = Model()
    optimizer = torch_bf16.AdamW(bare.named_parameters(), lr=0.01)
    model = wrapped(bare)
    torch_bf16.release_gradients(model, optimizer)
    backward(model, rank, 0)
    weights = [p.detach().clone() for p in bare.parameters()]
    with pytest.raises(NotImplementedError, match="accumulation_steps=n in release_gradients"):
        backward(model, rank, 1)
    assert all(map(torch.equal, weights, bare.parameters()))


CASES = {
    "ddp": run_ddp,
    "ddp-views": functools.partial(run_ddp, view=True),
    "ddp-wire": functools.partial(run_ddp, wire=True),
    "ddp-wire-views": functools.partial(run_ddp, wire=True, view=True),
    "ddp-sums": functools.partial(run_ddp, passes=3),
    "ddp-no-sync": functools.partial(run_ddp, passes=3, no_sync=True),
    "default-reduction": run_default_reduction,
    "columns": functools.partial(run_default_reduction, columns=True),
    "resume": run_resume,
    **{
        f"ordinary-{case}": functools.partial(run_ordinary, case=case)
        for case in ("unused", "static", "hook", "constructor")
    },
    "wrapped-later": run_wrapped_later,
    "removed": run_removed,
    "two-optimizers": run_two_optimizers,
    "second-pass": run_second_pass_is_refused,
}
SHARDED = {
    "fsdp2": functools.partial(run_sharded, mesh=(2,)),
    "fsdp2-sums": functools.partial(run_sharded, mesh=(2,), passes=3),
    "fsdp2-no-sync": functools.partial(run_sharded, mesh=(2,), passes=3, synchronised=False),
    "replicas-of-fsdp2": functools.partial(run_sharded, mesh=(2, 1)),
}


def run(names):
    for name in names:
        (CASES | SHARDED)[name](dist.get_rank(), dist.get_world_size())


def run_hsdp():
    run_sharded(dist.get_rank(), dist.get_world_size(), mesh=(2, 2), passes=2)
