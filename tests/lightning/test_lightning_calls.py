"""A module in our modes, called where no step is running."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from lightning_models import FABRICS, FEATURES, batches, host, make_module, make_trainer
from torch import nn
from torch.distributions import Normal

import torch_bf16

X = torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(5))


class Net(nn.Module):
    """With a method beside ``forward``, and a part that turns autocast off."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.GELU())
        self.head = nn.Linear(16, 4)

    def act(self, x):
        return self.head(self.body(x)).argmax(-1)

    def forward(self, x):
        return self.head(self.body(x))


def fitted(pl, mode="bf16-stochastic", **options):
    module = make_module(pl, **options)
    make_trainer(pl, mode).fit(module, batches(2))
    return module


def test_every_place_where_a_trainer_lets_a_module_be_called(pl, mode):
    seen = {}

    def call(name):
        def hook(self, *args, **kwargs):
            with torch.no_grad():
                seen[name] = (self(X).dtype, self.net(X).dtype)
            return args[0] if name == "on_after_batch_transfer" else None

        return hook

    names = ("on_train_start", "on_train_epoch_start", "on_train_batch_end", "on_train_epoch_end")
    names += ("on_validation_epoch_end", "on_fit_end", "on_after_batch_transfer")
    hooks: dict[str, Any] = {name: call(name) for name in names}
    module = make_module(pl, **hooks)

    class Callback(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            seen["callback"] = (pl_module(X).dtype, pl_module.net(X).dtype)

    trainer = make_trainer(pl, mode, callbacks=[Callback()])
    trainer.fit(module, batches(2), batches(1))
    assert seen == dict.fromkeys((*names, "callback"), (torch.float32, torch.float32))
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


def test_a_fitted_module_works_as_in_its_steps(pl):
    module = fitted(pl)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module.net(X).float()
    assert torch.equal(module(X), expected)
    assert torch.equal(module.net(X), expected)
    assert module.net[0](X).dtype == torch.float32
    make_trainer(pl).validate(module, batches(1), verbose=False)


def test_after_float_it_computes_in_fp32(pl):
    module = fitted(pl).float()
    exact = module.net[3](module.net[2](module.net[1](module.net[0](X))))
    assert torch.equal(module(X), exact)
    assert torch.equal(module.net(X), exact)


def test_copies_and_pickles_work_and_are_the_modules_own(pl):
    module = fitted(pl)
    copied = copy.deepcopy(module)
    assert torch.equal(copied(X), module(X))
    with torch.no_grad():
        copied.net[0].weight.zero_()
    assert not torch.equal(copied(X), module(X))
    net = fitted(pl).net
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for again in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(net))):
        assert torch.equal(again(X), net(X))
    assert net.state_dict().keys() == make_module(pl).net.state_dict().keys()


def test_classes_stay_as_they_were_and_modules_are_freed(pl):
    module = fitted(pl)
    assert "forward" not in nn.Linear(2, 2).__dict__
    linear = copy.deepcopy(module.net[0])
    gc.collect()
    gc.disable()
    try:
        alive = weakref.ref(linear)
        del linear
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:`?torch.jit.*deprecated")
def test_scripted_traced_and_compiled_modules(fabric_package):
    fabric = fabric_package.Fabric(accelerator="cpu", devices=1, precision="bf16-stochastic")
    net = Net()
    fabric.setup_module(net)
    expected = net(X)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        script: Any = torch.jit.script(net)
        assert torch.allclose(script(X).float(), expected, atol=0.02)
    traced: Any = torch.jit.trace(net, X)
    assert torch.allclose(traced(X), expected)
    whole = torch.__version__ >= "2.8"  # torch 2.7 breaks the graph at a weak reference
    assert torch.equal(torch.compile(net, backend="eager", fullgraph=whole)(X), expected)


def test_what_turns_autocast_off_within_a_step_is_left_alone(pl):
    seen = []

    def training_step(self, batch, batch_idx):
        with torch.autocast("cpu", enabled=False):
            seen.append(self.net[0](batch[0].bfloat16()).dtype)
        seen.append(self.net[0](batch[0]).dtype)
        return self.net(batch[0]).sum()

    fitted(pl, training_step=training_step)
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("compute", ["autocast", "fp32", "bf16"])
@pytest.mark.parametrize("package", FABRICS)
def test_methods_of_a_module_that_fabric_has_set_up(package, compute):
    own = host(f"lightning_bf16.{package.rpartition('.')[2]}").BF16Precision
    plugins = [own("bf16-stochastic", compute=compute)]
    fabric = host(package).Fabric(accelerator="cpu", devices=1, plugins=plugins)
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    assert model.act(X).shape == (3,)
    model.mark_forward_method("act")
    assert torch.equal(model.act(X), net.act(X))
    fabric.backward(model(X).sum())
    optimizer.step()
    for outputs in (model(X), net(X), net.head(net.body(X))):
        assert outputs.dtype == torch.float32
    assert isinstance(optimizer.optimizer, torch_bf16.BF16Optimizer)


def test_a_module_fitted_without_autocast(pl):
    own = host(f"lightning_bf16.{pl.__name__.rpartition('.')[2]}").BF16Precision
    module = make_module(pl)
    # Also with a part in fp32 before the others.
    plugin = own(compute="bf16", keep_fp32=["net.0"])
    make_trainer(pl, plugins=[plugin]).fit(module, batches(2))
    assert {p.dtype for p in module.net.parameters()} == {torch.float32, torch.bfloat16}
    assert module(X).dtype == module.net(X).dtype == torch.float32


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    score: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


class Named(NamedTuple):
    x: torch.Tensor


@pytest.mark.parametrize("kind", [Frozen, Named])
def test_a_batch_that_cannot_be_changed_is_returned_in_fp32(pl, mode, kind):
    seen = []

    class Callback(pl.Callback):
        def on_test_batch_end(self, trainer, pl_module, outputs, batch, *_):
            seen.append((type(outputs), outputs.x.dtype, batch.x.dtype))

    loader = torch.utils.data.DataLoader([0, 1], collate_fn=lambda _: kind(X.bfloat16()))
    hooks = {
        "test_step": lambda self, batch, batch_idx: batch,
        "transfer_batch_to_device": lambda self, batch, *_: batch,  # Lightning's copies none
    }
    trainer = make_trainer(pl, mode, callbacks=[Callback()])
    trainer.test(make_module(pl, **hooks), loader, verbose=False)
    assert seen == [(kind, torch.float32, torch.bfloat16)] * 2


KINDS = {
    "dataclass": (Batch, lambda b: b.x, lambda b, y: setattr(b, "score", y), lambda b: b.score),
    "dict": (
        lambda x: {"x": x},
        lambda b: b["x"],
        lambda b, y: b.update(score=y),
        lambda b: b["score"],
    ),
    "list": (lambda x: [x], lambda b: b[0], lambda b, y: b.append(y), lambda b: b[1]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [False, True], ids=["fp32", "bf16"])
def test_a_step_that_returns_its_batch_returns_that_object_in_fp32(pl, mode, kind, part):
    """As anomalib's steps do, whose callbacks write into the one and read the other."""
    make, read, write, written = KINDS[kind]

    def step(self, batch, batch_idx):
        write(batch, self.net(read(batch)) if part else self(read(batch)))
        return batch

    seen = []

    class Callback(pl.Callback):
        def on_test_batch_end(self, trainer, pl_module, outputs, batch, *_):
            seen.append((outputs is batch, written(batch).dtype))

    loader = torch.utils.data.DataLoader([0, 1], collate_fn=lambda _: make(X))
    module = make_module(pl, test_step=step)
    make_trainer(pl, mode, callbacks=[Callback()]).test(module, loader, verbose=False)
    assert seen == [(True, torch.float32)] * 2


class Scored(dict):
    """A dict that cannot be made of its items."""

    def __init__(self, y):
        super().__init__(y=y)


def in_a_circle(y):
    made = {"y": y}
    made["itself"] = made
    return made


RETURNED = {
    "range": (lambda y: {"y": y, "rows": range(8)}, lambda made: made["y"]),
    "own class": (Scored, lambda made: made["y"]),
    "circle": (in_a_circle, lambda made: made["y"]),
    "distribution": (lambda y: Normal(y, y.exp()), lambda made: made.loc),
}


@pytest.mark.parametrize("kind", RETURNED)
def test_a_step_returns_containers_of_any_kind_in_fp32(pl, mode, kind):
    make, read = RETURNED[kind]
    seen = []

    def training_step(self, batch, batch_idx):
        y = self.net(batch[0])
        made = make(y.detach())
        if not isinstance(made, dict):
            return {"loss": y.float().square().mean(), "made": made}
        made["loss"] = y.float().square().mean()
        return made

    class Callback(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, *_):
            seen.append(read(outputs.get("made", outputs)).dtype)

        def on_test_batch_end(self, trainer, pl_module, outputs, *_):
            seen.append(read(outputs).dtype)

    module = make_module(
        pl,
        training_step=training_step,
        test_step=lambda self, batch, batch_idx: make(self.net(batch[0])),
    )
    trainer = make_trainer(pl, mode, callbacks=[Callback()])
    trainer.fit(module, batches(2))
    trainer.test(module, batches(2), verbose=False)
    assert seen == [torch.float32] * 4
