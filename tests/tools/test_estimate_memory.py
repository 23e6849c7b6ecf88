"""Every row of an estimate against models that were allocated and have taken a real step."""

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from sharded_models import local
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import torch_bf16
from torch_bf16.tools.estimate.live import LiveBytes
from torch_bf16.tools.estimate.memory import memory
from torch_bf16.tools.estimate.optimizers import OPTIMIZERS, PLAIN, measured, stepped
from torch_bf16.tools.estimate.precisions import precisions
from torch_bf16.tools.estimate.shapes import shapes_of
from torch_bf16.tools.estimate.sharded import traffic

ROWS = {each.label: each for each in precisions()}
OURS = [name for name, each in ROWS.items() if each.recipe]
TOLERANCE = 0.01


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied weights, a row that is no whole block, running statistics, a frozen matrix, a buffer."""

    def __init__(self, width=96, words=301):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.statistics = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight
        self.odd = nn.Linear(width, 50)
        self.last = nn.Linear(50, 7)
        self.register_buffer("table", torch.randn(64, 64), persistent=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.frozen(self.statistics(x.flatten(0, 1)))
        return self.head(x).float().mean() + self.last(self.odd(x)).float().square().mean()


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(301, 96)
        self.layers = nn.ModuleList(Layer(96) for _ in range(3))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def trained(precision, model, optimizer="AdamW"):
    """The model and its optimizer after a real step, its gradients still there."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if precision.recipe is None:
        model = model.to(precision.dtype)
        stepper = getattr(torch.optim, optimizer)(parameters, lr=1e-3)
    else:
        torch_bf16.cast_model(model, precision.recipe)
        made = getattr(torch_bf16, optimizer)
        stepper = made(parameters, lr=1e-3, recipe=precision.recipe, backend="eager")
    if precision.released:
        torch_bf16.release_gradients(model, stepper)
    cast = precision.autocast or precision.recipe is not None
    tokens = torch.randint(0, 300, (4, 8))
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        loss = model(tokens)
    loss.backward()
    stepper.step()
    return model, stepper


def nbytes(tensors):
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in map(local, tensors)}
    return sum(each.nbytes() for each in storages.values())


def allocated(model, optimizer):
    """Bytes by role, of the tensors themselves."""
    masters = ("remainder16", "remainder8", "master")
    states = [s for each in optimizer.state.values() for s in each.items() if s[0] != "step"]
    return {
        "weights": nbytes(model.parameters()),
        "buffers": nbytes(model.buffers()),
        "gradients": nbytes(p.grad for p in model.parameters() if p.grad is not None),
        "moments": nbytes(t for name, t in states if name not in masters),
        "master": nbytes(t for name, t in states if name in masters),
    }


@pytest.mark.parametrize("label", ROWS)
def test_a_row_has_the_bytes_of_an_allocated_model(label):
    precision = ROWS[label]
    found = memory(shapes_of(Net(), "Net"), precision, stepped("AdamW"))
    real = allocated(*trained(precision, Net()))
    frozen = 96 * 96 * {"bf16+16": 2, "bf16+8": 2, "bf16+fp32": 4}.get(
        precision.recipe.weights if precision.recipe else "", 0
    )
    real["master"] += frozen  # what the cast took, which is in no optimizer
    if precision.released:
        real["gradients"] = 301 * 96 * 2  # the embedding's, which is gone by now
    for role, size in real.items():
        assert getattr(found, role) == pytest.approx(size, rel=TOLERANCE, abs=64), role


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "SGD(momentum=0.9)"])
@pytest.mark.parametrize("label", ["32-true", "bf16-stochastic"])
def test_other_optimizers_have_the_states_of_their_rule(label, optimizer):
    precision, needs = ROWS[label], stepped(optimizer)
    if precision.recipe is None and needs.scratch is None:
        pytest.skip("torch has no such optimizer")
    shapes = shapes_of(nn.Linear(128, 64), "Linear")
    model = nn.Linear(128, 64)
    if precision.recipe:
        torch_bf16.cast_model(model, precision.recipe)
    name, _, options = optimizer.partition("(")
    options = {"momentum": 0.9} if options else {}
    library = torch_bf16 if precision.recipe else torch.optim
    made = getattr(library, name)(model.parameters(), lr=1e-3, **options)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    made.step()
    real = allocated(model, made)
    found = memory(shapes, precision, needs)
    assert found.moments == pytest.approx(real["moments"], rel=TOLERANCE, abs=64)
    assert found.master == pytest.approx(real["master"], rel=TOLERANCE)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_known_rules_and_scratch_are_those_of_a_real_step(name):
    found = measured(name, name, {})
    rule, scratch = PLAIN[name]
    assert found.rule is rule
    assert found.scratch == (scratch if scratch is None else pytest.approx(scratch, rel=0.01))


@pytest.mark.parametrize("label", ["32-true", "bf16-true", "bf16-stochastic", "bf16-fp32-master"])
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
def test_the_peak_of_a_step_is_what_lives_at_once(label, first):
    precision, needs = ROWS[label], stepped("AdamW")
    # So many that what is there for one tensor at a time is below the tolerance.
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(32)))
    found = memory(shapes_of(model, "Linear"), precision, needs)
    if precision.recipe is None:
        model = model.to(precision.dtype)
        made = torch.optim.AdamW(model.parameters(), foreach=True)
    else:
        torch_bf16.cast_model(model, precision.recipe)
        # The kernels of CPUs and GPUs work in place; eager ones hold scratch.
        made = torch_bf16.AdamW(model.parameters(), recipe=precision.recipe, backend="cpu")
    before = nbytes(model.parameters())
    with LiveBytes() as live:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if not first:
            made.step()
            live.peak = live.now
        made.step()
    expected = found.peak() if first or precision.recipe is None else found.held
    # The master is what the cast took, which was there before.
    assert live.peak + before + found.master == pytest.approx(expected, rel=TOLERANCE)


def sharded_bytes(label, world):
    precision = ROWS[label]
    torch.manual_seed(0)
    model = Stack()
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
    options = {"recipe": precision.recipe, "backend": "eager"} if precision.recipe else {}
    made = library.AdamW(model.parameters(), lr=1e-3, **options)
    tokens = torch.randint(0, 300, (2, 4))
    for _ in range(2):
        with Counted() as sent:
            model(tokens).float().square().mean().backward()
        made.step()
        real = allocated(model, made)
        made.zero_grad()
    return real, sent.bytes


class Counted(TorchDispatchMode):
    """Bytes that this rank sends in collectives of FSDP2."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        place = {"c10d::_allgather_base_": 1, "c10d::_reduce_scatter_base_": 0}.get(func.name())
        if place is not None:
            self.bytes += args[place].nbytes * (dist.get_world_size() - 1)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("label", ["32-true", "bf16-mixed", "bf16-true", "bf16-stochastic", "bf16-fp32-master", "bf16+8 / int8 / int8"])
def test_a_sharded_row_has_the_bytes_of_each_rank(ranks: Ranks, label, world):
    shapes, precision = shapes_of(Stack(), "Stack"), ROWS[label]
    for rank, (real, sent) in enumerate(ranks(world, sharded_bytes, label, world)):
        found = memory(shapes, precision, stepped("AdamW"), world, rank)
        for role, size in real.items():
            assert getattr(found, role) == pytest.approx(size, rel=TOLERANCE), (rank, role)
        assert traffic(shapes, precision, world).sent == pytest.approx(sent, rel=TOLERANCE)


@pytest.mark.parametrize("label", OURS[::2])
def test_the_checkpoint_has_the_size_of_the_file(label, tmp_path):
    precision = ROWS[label]
    model, optimizer = trained(precision, Net(width=384))
    torch_bf16.save_checkpoint(tmp_path / "run.pt", model=model, optimizer=optimizer)
    found = memory(shapes_of(Net(width=384), "Net"), precision, stepped("AdamW"))
    assert found.saved == pytest.approx((tmp_path / "run.pt").stat().st_size, rel=TOLERANCE)
