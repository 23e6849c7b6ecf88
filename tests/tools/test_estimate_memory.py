"""Every row of an estimate against models that were allocated and have taken a real step."""

import pytest
import torch
from estimated_models import ROWS, Layer, allocated, nbytes
from slow_bus import use
from torch import nn

import torch_bf16
from torch_bf16.tools.estimate import memory as rows
from torch_bf16.tools.estimate import optimizers
from torch_bf16.tools.estimate.activations import batch_argument, peak_of_pass
from torch_bf16.tools.estimate.live import LiveBytes
from torch_bf16.tools.estimate.memory import memory
from torch_bf16.tools.estimate.optimizers import OPTIMIZERS, PLAIN, measure_spec, optimizer_spec
from torch_bf16.tools.estimate.precisions import precisions
from torch_bf16.tools.estimate.shapes import shapes_of

OURS = [name for name, each in ROWS.items() if each.recipe]
PEAKS = ["32-true", "bf16-true", "bf16-stochastic", "bf16-fp32-master"]
TOLERANCE = 0.01


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


@pytest.mark.parametrize("label", ROWS)
def test_a_row_has_the_bytes_of_an_allocated_model(label):
    precision = ROWS[label]
    found = memory(shapes_of(Net(), "Net"), precision, optimizer_spec("AdamW"))
    model, stepper = trained(precision, Net())
    real = allocated(model, stepper)
    frozen = (
        96
        * 96
        * {"bf16+16": 2, "bf16+8": 2, "bf16+fp32": 4}.get(
            precision.recipe.weights if precision.recipe else "", 0
        )
    )
    real["master"] += frozen  # what the cast took, which is in no optimizer
    if precision.released:
        # They are gone by now, and so few that all of them have waited for one kernel call.
        real["gradients"] = sum(p.nbytes for p in {*model.parameters()} if p.requires_grad)
    for role, size in real.items():
        assert getattr(found, role) == pytest.approx(size, rel=TOLERANCE, abs=64), role


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_buffers_have_the_bytes_of_their_dtypes(dtype, persistent):
    model = nn.Linear(4, 4)
    model.register_buffer("table", torch.zeros(640, dtype=dtype), persistent=persistent)
    found = memory(shapes_of(model, "Linear"), ROWS["bf16-true"], optimizer_spec("AdamW"))
    model.bfloat16()
    assert found.buffers == model.table.nbytes
    weights = nbytes(model.parameters())
    assert found.saved == 3 * weights + model.table.nbytes * persistent


OF_TORCH = [each for each in OPTIMIZERS if hasattr(torch.optim, each)]


@pytest.mark.parametrize(
    ("label", "optimizer"),
    [
        *(("32-true", each) for each in (*OF_TORCH, "SGD(momentum=0.9)")),
        *(("bf16-stochastic", each) for each in (*OPTIMIZERS, "SGD(momentum=0.9)")),
    ],
)
def test_other_optimizers_have_the_states_of_their_rule(label, optimizer):
    precision, needs = ROWS[label], optimizer_spec(optimizer)
    # Alone, Muon is for matrices.
    shapes, model = (nn.Linear(128, 64, bias=optimizer != "Muon") for _ in range(2))
    shapes = shapes_of(shapes, "Linear")
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
def test_the_known_rules_and_scratch_are_those_of_a_real_step(name, monkeypatch):
    # Many CPUs are slow at products in bf16, which are torch's Muon.
    monkeypatch.setattr(optimizers, "_PROBE", (256, 256))
    found = measure_spec(name, name, {})
    rule, scratch = PLAIN[OPTIMIZERS[name]]
    assert found.rule is rule
    assert found.scratch == (scratch if scratch is None else pytest.approx(scratch, rel=0.01))


@pytest.mark.parametrize("way", ["foreach=True", "foreach=False", "fused=True"])
def test_scratch_is_that_of_the_way_that_was_asked_for(way):
    model, (name, _, value) = (
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))),
        way.partition("="),
    )
    found = memory(shapes_of(model, "it"), ROWS["32-true"], optimizer_spec(f"AdamW({way})"))
    made = torch.optim.AdamW(model.parameters(), **{name: value == "True"})
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    made.step()
    with LiveBytes() as live:
        made.step()
    assert found.passing == pytest.approx(live.peak, rel=TOLERANCE, abs=128)


@pytest.mark.parametrize("label", [*PEAKS, "bf16+8 / bf16_nearest / bf16_stochastic"])
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
def test_the_peak_of_a_step_is_what_lives_at_once(label, first):
    precision, needs = ROWS[label], optimizer_spec("AdamW")
    # So many that what is there for one tensor at a time is below the tolerance.
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(128)))
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
    # What the cast took was there before: it becomes the master, or is dropped for a smaller one.
    known = found.master if label == "bf16-fp32-master" else found.passing * first
    known = known if precision.recipe else 0
    assert live.peak + before + known == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("way", ["released", "bf16_stochastic", "fp32"])
def test_gradients_that_are_taken_within_the_pass_are_counted_as_they_wait(way):
    released = way == "released"
    ways = precisions(accumulate=None if released else way)
    (precision,) = (
        each for each in ways if each.name == "bf16-stochastic" and each.released == released
    )
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))
    found = memory(shapes_of(model, "Linear"), precision, optimizer_spec("AdamW"))
    batch, meta = batch_argument("1x1024"), torch.device("meta")
    traced = peak_of_pass(model.to("meta"), precision, batch, meta, precision.waiting)
    assert precision.recipe is not None
    model = torch_bf16.cast_model(model.to_empty(device="cpu"), precision.recipe)
    optimizer = torch_bf16.AdamW(model.parameters(), recipe=precision.recipe, backend="cpu")
    if released:
        torch_bf16.release_gradients(model, optimizer)
        assert torch_bf16.describe(model, optimizer).bytes_by_role["gradients"] == (
            found.gradients / found.weights * 2
        )
    batch = torch.randn(1, 1024, dtype=torch.bfloat16)
    for _ in range(2):  # the first pass makes states, or sums
        with LiveBytes() as live:
            model(batch).float().mean().backward()
        if released:
            optimizer.step()
    # Autograd casts the one that is added to an fp32 sum.
    cast = 4 * 2**20 * (way == "fp32")
    assert 0.9 * found.gradients < live.peak - cast < 1.05 * found.gradients
    assert 0.9 * found.gradients < traced < 1.05 * found.gradients


@pytest.mark.parametrize("label", OURS[::2])
def test_the_checkpoint_has_the_size_of_the_file(label, tmp_path):
    precision = ROWS[label]
    model, optimizer = trained(precision, Net(width=384))
    torch_bf16.save_checkpoint(tmp_path / "run.pt", model=model, optimizer=optimizer)
    found = memory(shapes_of(Net(width=384), "Net"), precision, optimizer_spec("AdamW"))
    assert found.saved == pytest.approx((tmp_path / "run.pt").stat().st_size, rel=TOLERANCE)


@pytest.mark.parametrize("name", ["bf16-stochastic", "bf16-fp32-master", "bf16+8 / int8 / int8"])
def test_states_in_host_memory_are_counted_there(monkeypatch, name):
    link = use(monkeypatch)
    (there,) = (
        each for each in precisions(offload="states") if each.name == name and not each.released
    )
    plain = memory(shapes_of(Net(), "Net"), ROWS[name], optimizer_spec("AdamW"))
    small = memory(shapes_of(Net(), "Net"), there, optimizer_spec("AdamW"))
    # All of its parameters are small.
    assert (small.moments, small.staging) == (plain.moments, 0)
    monkeypatch.setattr(rows, "SMALLEST", 0)
    found = memory(shapes_of(Net(), "Net"), there, optimizer_spec("AdamW"))
    _, optimizer = trained(there, Net())
    states = [each for state in optimizer.state.values() for each in state.values()]
    frozen = 96 * 96 * (0 if name == "bf16-stochastic" else 2)
    assert found.host == sum(each.nbytes for each in states if link.holds(each)) + frozen
    assert (found.moments, found.master, found.passing) == (0, 0, 0)
    assert found.staging == 2 * 64 * 2**20
    assert (found.weights, found.gradients) == (plain.weights, plain.gradients)
    assert found.saved == plain.saved
    assert plain.held - found.held == found.host - found.staging
