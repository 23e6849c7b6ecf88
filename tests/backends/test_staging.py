"""Planes in host memory pass through buffers: the same bits in every order that is allowed."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from slow_bus import ORDERS, use

import torch_bf16
from torch_bf16 import Recipe
from torch_bf16.backends import bus, staging
from torch_bf16.states import home

SHAPES = [(64, 64), (70, 128), (9,), (0, 3), (130, 64)]
RECIPES = {
    "stochastic": Recipe(),
    "master": torch_bf16.get_recipe("bf16-fp32-master"),
    "bytes": Recipe(weights="bf16+8", exp_avg="int8", exp_avg_sq="int8"),
}
BUFFER = 1 << 13
CALL = staging.StagedKernel.__call__


def made(recipe, offload="none"):
    recipe = torch_bf16.get_recipe(recipe, offload=offload)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]
    named = [(f"p{n}", torch.nn.Parameter(each)) for n, each in enumerate(weights)]
    named.append(("fp32", torch.nn.Parameter(torch.ones(33, 7))))
    return torch_bf16.AdamW(named, lr=0.01, recipe=recipe, backend="eager")


def trained(optimizer, steps=2, missing=()):
    generator = torch.Generator().manual_seed(1)
    parameters = optimizer.param_groups[0]["params"]
    for step in range(steps):
        for number, p in enumerate(parameters):
            gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = None if (step, number) in missing else gradient
        optimizer.step()
    return contents(optimizer)


def contents(optimizer):
    parameters = optimizer.param_groups[0]["params"]
    states = [each for p in parameters for each in optimizer.state.get(p, {}).values()]
    return [each.detach().clone().view(-1) for each in (*parameters, *states)]


def same(one, other):
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_allowed_order_has_the_bits_of_states_on_the_device(monkeypatch, recipe, order):
    expected = trained(made(RECIPES[recipe]))
    link = use(monkeypatch, order, buffer=BUFFER)
    assert same(trained(made(RECIPES[recipe], "states")), expected)
    # Several loads in each step, and one wait of the host.
    assert link.log.count("compute") >= 6
    assert link.finishes == 2


@pytest.mark.parametrize("stream", ["up", "compute", "down"])
def test_each_wait_is_needed(monkeypatch, stream):
    expected = trained(made(RECIPES["stochastic"]))
    found = []
    for order in ORDERS:
        with monkeypatch.context() as patch:
            use(patch, order, without=stream, buffer=BUFFER)
            found.append(same(trained(made(RECIPES["stochastic"], "states")), expected))
    assert not all(found)


def test_the_wait_of_the_host_is_needed(monkeypatch):
    expected = trained(made(RECIPES["stochastic"]))
    link = use(monkeypatch, ORDERS[0], buffer=BUFFER)
    monkeypatch.setattr(link, "finish", lambda event: None)
    assert not same(trained(made(RECIPES["stochastic"], "states")), expected)


def test_copies_of_the_next_and_the_last_load_run_beside_a_kernel(monkeypatch):
    link = use(monkeypatch, ("up", "compute", "down"), buffer=BUFFER)
    trained(made(RECIPES["stochastic"], "states"), steps=1)
    # Up as far as buffers go, before anything is computed; down as late as they are needed again.
    assert link.log[:3] == ["up", "up", "compute"]
    with monkeypatch.context() as patch:
        link = use(patch, ("compute", "down", "up"), buffer=BUFFER)
        trained(made(RECIPES["stochastic"], "states"), steps=1)
    assert link.log[:5] == ["up", "compute", "down", "up", "compute"]


def test_what_has_no_gradient_is_not_copied(monkeypatch):
    copied = []
    copy = staging._copy
    missing = {(1, n) for n in range(1, 6)}
    expected = trained(made(RECIPES["master"]), missing=missing)
    use(monkeypatch, buffer=BUFFER)
    monkeypatch.setattr(
        staging, "_copy", lambda pairs: copy(copied.append(to.nbytes) or (to, x) for to, x in pairs)
    )
    optimizer = made(RECIPES["master"], "states")
    assert same(trained(optimizer, missing=missing), expected)
    (first, *_), each = optimizer.param_groups[0]["params"], sum(copied)
    copied.clear()
    for p in optimizer.param_groups[0]["params"][1:]:
        p.grad = None
    optimizer.step()
    # Lower half, two moments in fp32, up and down.
    assert sum(copied) == 2 * first.numel() * (2 + 4 + 4) < each


@pytest.mark.parametrize(
    ("numel", "width", "pitch"), [(1, 1, 1), (10_000, 10_000, 10_000), (8192, 64, 100)]
)
def test_pieces_are_all_elements_once_and_fit_a_buffer(monkeypatch, numel, width, pitch):
    cut = _pieces_of(monkeypatch, numel, width, pitch)
    assert [p.start for p in cut] == [sum(q.numel for q in cut[:n]) for n in range(len(cut))]
    assert sum(p.numel for p in cut) == numel
    for piece in cut:
        whole_runs = piece.start % width == 0 and piece.numel % width == 0
        last = piece.start + piece.numel == numel
        assert whole_runs or last or piece.numel % 256 == 0
        within = piece.start // width == (piece.start + piece.numel - 1) // width
        assert whole_runs or within


def test_a_run_that_is_longer_than_a_buffer_is_cut(monkeypatch):
    cut = _pieces_of(monkeypatch, 3 * 5000, 5000, 7000)
    assert all(p.start // 5000 == (p.start + p.numel - 1) // 5000 for p in cut)
    assert sum(p.numel for p in cut) == 15000
    assert len(cut) > 6


def _pieces_of(patch, numel, width, pitch):
    import numpy as np

    from torch_bf16.backends import Bucket, Variant
    from torch_bf16.formats import BF16_NEAREST, BF16_STOCHASTIC
    from torch_bf16.rules import ADAMW

    link = use(patch, buffer=BUFFER)
    formats = BF16_STOCHASTIC, BF16_NEAREST, BF16_STOCHASTIC
    indices = "strided" if width < numel else "consecutive"
    variant = Variant(ADAMW, formats, torch.bfloat16, torch.device("cpu"), indices)
    weight = torch.zeros(numel, dtype=torch.bfloat16)
    planes = [((weight,), *((link.zeros((numel,), torch.bfloat16),) for _ in range(2)))]
    ones = [np.array([n], np.int64) for n in (numel, 0, width, pitch)]
    bucket = Bucket(variant, planes, *ones, np.zeros((1, 3, 2), np.uint32))
    loads = [*staging._cut_into_loads(bucket)]
    for each in loads:
        assert sum(4 * piece.numel for piece in each) <= BUFFER
    return [piece for each in loads for piece in each]


def test_a_step_that_breaks_off_is_waited_for_and_the_next_one_is_right(monkeypatch):
    link = use(monkeypatch, buffer=BUFFER)
    optimizer = made(RECIPES["stochastic"], "states")
    trained(optimizer, steps=1)
    before, run, calls = contents(optimizer), staging.Staging.run, []

    def breaking(*arguments):
        calls.append(0)
        if len(calls) == 2:
            raise RuntimeError("no memory")
        run(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(staging.Staging, "run", breaking)
        with pytest.raises(RuntimeError, match="no memory"):
            optimizer.step()
    assert link.finishes == 2
    assert not same(contents(optimizer), before)
    optimizer.step()
    assert not any(link._queues.values())


def test_a_copy_back_that_fails_leaves_a_step_in_part(monkeypatch):
    link = use(monkeypatch)
    optimizer = made(RECIPES["stochastic"], "states")
    trained(optimizer, steps=1)
    run = link.run

    def breaking(stream, work):
        if stream == link.down:
            raise RuntimeError("no copy")
        run(stream, work)

    monkeypatch.setattr(link, "run", breaking)
    with pytest.raises(RuntimeError, match=r"no copy.* may be updated in part"):
        optimizer.step()


def test_an_interrupt_while_it_waits_keeps_no_other_thread_out(monkeypatch):
    stage = staging.Staging(use(monkeypatch, buffer=BUFFER), torch.device("cpu"))
    stage._pass = 7  # as a backward pass that failed leaves it
    with monkeypatch.context() as patch:
        patch.setattr(stage, "finish", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), stage:
            pass
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(stage._lock.acquire, blocking=False).result(10)


class Stream:
    """As torch.cuda has it, of a device that is done at once."""

    current = None

    def __init__(self, device=None, name="side"):
        self.name = name

    def wait_event(self, event):
        Stream.log.append((self.name, "after", event.stream))


class Event:
    def record(self, stream):
        self.stream = stream.name

    def synchronize(self):
        Stream.log.append(("host", "after", self.stream))


def test_streams_and_events_of_torch_are_used_as_they_are(monkeypatch):
    expected = trained(made(RECIPES["master"]))
    use(monkeypatch, buffer=BUFFER)
    main, entered, host = Stream(name="compute"), [], []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(
        torch.cuda, "stream", lambda s: contextlib.nullcontext(entered.append(s.name))
    )
    monkeypatch.setattr(Stream, "log", [], raising=False)

    def pinned(shape, dtype):
        host.append(torch.empty(tuple(shape), dtype=dtype))
        return host[-1]

    monkeypatch.setattr(bus, "_pin", pinned)
    link = bus.Bus(torch.device("cuda", 0))
    link.up.name, link.down.name = "up", "down"

    def away(tensor, device):
        return any(tensor.untyped_storage() is each.untyped_storage() for each in host)

    monkeypatch.setattr(staging, "in_host_memory", away)
    for module in (staging, home):
        monkeypatch.setattr(module, "bus_of", lambda device: link)
    # Without the end of a call that a SlowBus needs.
    monkeypatch.setattr(staging.StagedKernel, "__call__", CALL)
    assert same(trained(made(RECIPES["master"], "states")), expected)
    loads = entered.count("compute")
    assert entered == ["up", "compute", "down"] * loads
    assert Stream.log[:3] == [
        ("up", "after", "compute"),  # what had the buffer's memory before
        ("compute", "after", "up"),
        ("down", "after", "compute"),
    ]
    assert Stream.log.count(("up", "after", "down")) >= loads - 2
    assert Stream.log.count(("host", "after", "down")) == 2


def test_devices_without_a_bus_are_named():
    assert bus.bus_of(torch.device("cpu")) is None
    with pytest.raises(NotImplementedError, match=r"on xpu cannot keep .* is for CUDA and ROCm"):
        bus.bus_of(torch.device("xpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there pinned memory can be had")
def test_memory_that_cannot_be_pinned_is_named():
    with pytest.raises(RuntimeError, match=r"pinned host memory .* \(3, 4\) in torch.float32"):
        bus._pin((3, 4), torch.float32)


def test_buffers_are_freed_with_the_last_kernel_that_uses_them(monkeypatch):
    use(monkeypatch, buffer=BUFFER)
    optimizer = made(RECIPES["stochastic"], "states")
    trained(optimizer, steps=1)
    assert len(staging._stagings) == 1
    optimizer._engine.invalidate()
    assert not staging._stagings
