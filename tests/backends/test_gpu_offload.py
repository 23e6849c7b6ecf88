"""States in host memory on GPUs (`pytest -m gpu`): bits, memory, and copies beside kernels."""

import gc
from itertools import product
from weakref import WeakValueDictionary

import pytest
import torch
from gpu_marks import each_device, gpus
from offloaded import BYTES, contents, same
from slow_bus import use
from torch import nn

import torch_bf16
from torch_bf16 import Recipe
from torch_bf16.backends import BUFFER_BYTES, BUFFERS

RECIPES = {
    "stochastic": Recipe(),
    "master": torch_bf16.get_recipe("bf16-fp32-master"),
    "bytes": BYTES,
}
# More than two buffers of moments in bf16.
LARGE = [(4096, 4096)] * 4 + [(1 << 16,)]


@pytest.fixture
def link(device, monkeypatch):
    """On a CPU a bus that is slow; on a GPU its own, through small buffers."""
    if device == "cpu":
        return use(monkeypatch)
    monkeypatch.setattr("torch_bf16.backends.staging.BUFFER_BYTES", 1 << 20)
    # Buffers of that size must not serve other tests, as long as something here is alive.
    monkeypatch.setattr("torch_bf16.backends.staging._stagings", WeakValueDictionary())
    monkeypatch.setattr("torch_bf16.states.home.SMALLEST", 0)
    return None


def network(device, recipe, offload, width=512, backend=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 48)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recipe = torch_bf16.get_recipe(RECIPES[recipe], offload=offload)
    return torch_bf16.prepare(model, optimizer, recipe, backend=backend)


def trained(model, optimizer, micro_batches=1, bound=None, steps=range(4)):
    device = next(model.parameters()).device
    for seed in steps:
        for _ in range(micro_batches):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
            model(x.to(device, torch.bfloat16)).float().square().mean().backward()
        if bound is not None:
            torch_bf16.clip_next_step(optimizer, bound)
        optimizer.skip_next_step_where(torch.tensor(float(seed == 2), device=device))
        optimizer.step()
        optimizer.zero_grad()
    return contents(model, optimizer)


@each_device()
@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_have_the_bits_of_states_on_the_device(device, link, recipe, backend):
    found = [
        trained(*network(device, recipe, offload, backend=backend), 2, 0.1)
        for offload in ("none", "states")
    ]
    assert same(*found)


@each_device()
@pytest.mark.parametrize("recipe", RECIPES)
def test_released_steps_do(device, link, recipe):
    found = []
    for offload in ("none", "states"):
        model, optimizer = network(device, recipe, offload)
        torch_bf16.release_gradients(model, optimizer)
        for seed in range(3):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
            model(x.to(device, torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
        found.append(contents(model, optimizer))
    assert same(*found)


@each_device()
@pytest.mark.parametrize("name", ["Muon", "Adafactor", "AdamWScheduleFree"])
def test_other_rules_do(device, link, name):
    found = []
    for offload in ("none", "states"):
        recipe = torch_bf16.get_recipe("bf16-fp32-master", offload=offload)
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(256, 192, generator=generator).bfloat16() for _ in range(3)]
        weights = [nn.Parameter(each.to(device)) for each in tensors]
        optimizer = getattr(torch_bf16, name)([*enumerated(weights)], lr=0.01, recipe=recipe)
        for _ in range(3):
            for p in weights:
                p.grad = torch.randn(p.shape, generator=generator).to(p)
            optimizer.step()
        if name == "AdamWScheduleFree":
            optimizer.eval()
        states = [x for p in weights for x in optimizer.state[p].values()]
        found.append([each.detach().cpu().clone().view(-1) for each in (*weights, *states)])
    assert same(*found)


def enumerated(weights):
    return ((f"p{number}", each) for number, each in enumerate(weights))


@each_device()
@pytest.mark.parametrize("places", [("none", "states"), ("states", "none")])
def test_a_run_is_resumed_under_the_other_place(device, link, places, tmp_path):
    expected = trained(*network(device, "bytes", "none"), steps=range(6))
    before, after = places
    model, optimizer = network(device, "bytes", before)
    trained(model, optimizer, steps=range(3))
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "run.pt")
    model, optimizer = network(device, "bytes", after)
    saved = torch.load(tmp_path / "run.pt")
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert same(trained(model, optimizer, steps=range(3, 6)), expected)


def large(offload, recipe="stochastic"):
    recipe = torch_bf16.get_recipe(RECIPES[recipe], offload=offload)
    weights = [nn.Parameter(torch.ones(s, device="cuda").bfloat16()) for s in LARGE]
    for p in weights:
        p.grad = torch.full_like(p, 1e-3)
    return weights, torch_bf16.AdamW([*enumerated(weights)], recipe=recipe)


ON_GPU = pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpus())])


@ON_GPU
@pytest.mark.parametrize("recipe", RECIPES)
def test_states_are_pinned_and_a_step_takes_its_buffers_alone(device, recipe):
    gc.collect()
    weights, optimizer = large("states", recipe)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        optimizer.step()
    kept = [x for p in weights for key, x in optimizer.state[p].items() if key != "step"]
    assert all(each.is_pinned() for each in kept)
    # Beside the buffers, tables and counters, and the kernels' trials.
    assert torch.cuda.max_memory_allocated() - before < BUFFERS * BUFFER_BYTES + (16 << 20)
    assert sum(each.nbytes for each in kept) > BUFFERS * BUFFER_BYTES


def traced(optimizer):
    """What the device did in a step after the first."""
    optimizer.step()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    return profile.events()


@ON_GPU
def test_copies_up_and_down_run_beside_each_other_and_beside_kernels(device):
    _, optimizer = large("states")
    events = traced(optimizer)
    up, down = ([e.time_range for e in events if way in e.name] for way in ("HtoD", "DtoH"))
    kernels = [e.time_range for e in events if e.name == "step"]
    for one, other in ((up, down), (up + down, kernels)):
        assert any(a.start < b.end and b.start < a.end for a, b in product(one, other))


@ON_GPU
def test_each_state_is_copied_up_and_down_once(device):
    weights, optimizer = large("states")
    events = traced(optimizer)
    kept = [x for p in weights for key, x in optimizer.state[p].items() if key != "step"]
    copies = [each for each in events if "Memcpy" in each.name]
    for way in ("HtoD", "DtoH"):
        count = sum(way in each.name for each in copies)
        # A tensor is cut where a buffer ends; a table of gradients may be among them.
        assert len(kept) <= count <= 2 * len(kept) + 8, (way, count)


@ON_GPU
def test_a_captured_step_is_refused_by_name(device):
    _, optimizer = large("states")
    optimizer.step()
    with pytest.raises(RuntimeError, match="states are in host memory"):
        optimizer.graphed()


@ON_GPU
def test_a_state_is_read_right_after_a_step(device):
    _, optimizer = large("states")
    _, plain = large("none")
    for _ in range(3):
        optimizer.step()
        plain.step()
        mine, theirs = (
            each.state[each.param_groups[0]["params"][-1]]["exp_avg"] for each in (optimizer, plain)
        )
        assert torch.equal(mine, theirs.cpu())
