"""Gradients summed in a format of their own, and released, through Trainer and Fabric."""

from __future__ import annotations

import re

import pytest
import torch
from lightning_models import FABRICS, TRAINERS, batches, host, make_module, make_trainer
from thousandths import THOUSANDTHS, Summing, assert_summed
from torch import nn

import lightning_bf16
import torch_bf16
from torch_bf16 import plugin_api


def plugin_of(package, **options):
    """That package's plugin."""
    name = package.__name__
    family = {"lightning.pytorch": "pytorch", "lightning.fabric": "fabric"}.get(name, name)
    module = __import__(f"lightning_bf16.{family}", fromlist=["BF16Precision"])
    return module.BF16Precision(**options)


# Each package and each format: what a format does depends on no package. In lightning.pytorch both
# modes sum stochastically in test_a_thousand_small_gradients_add_up.
@pytest.mark.parametrize(
    ("package", "accumulate"),
    [
        (TRAINERS[0], "bf16_nearest"),
        (TRAINERS[0], "fp32"),
        (TRAINERS[1], "bf16_stochastic"),
    ],
)
def test_accumulate_grad_batches_sums_in_the_format_that_was_asked_for(package, accumulate):
    seen, pl = [], host(package)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = Summing()

        def training_step(self, batch, batch_idx):
            return 1000 * self.inner(batch)

        def on_before_optimizer_step(self, optimizer):
            seen.append(self.inner.w.grad.detach().clone())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    plugin = plugin_of(pl, recipe="bf16-stochastic", accumulate=accumulate)
    trainer = make_trainer(pl, None, plugins=[plugin], accumulate_grad_batches=1000)
    trainer.fit(Module(), torch.utils.data.DataLoader(THOUSANDTHS, batch_size=None))
    (gradient,) = seen
    assert_summed(gradient, accumulate)
    assert (gradient.dtype == torch.float32) == (accumulate == "fp32")


ORDERS = [
    ["setup"],
    ["setup", "setup_optimizers"],
    ["setup_module", "setup_optimizers"],
    ["setup_optimizers", "setup"],
    ["setup_optimizers", "setup_module"],
]


def set_up(fabric, module, optimizer, order):
    """Set up a module and an optimizer by methods of Fabric, in this order."""
    if order == ["setup"]:
        return fabric.setup(module, optimizer)
    given = {"setup": module, "setup_module": module, "setup_optimizers": optimizer}
    made = {name.removeprefix("setup_"): getattr(fabric, name)(given[name]) for name in order}
    return made.get("setup", made.get("module")), made["optimizers"]


# Every order in one package and one format: no other depends on it.
@pytest.mark.parametrize(
    ("package", "accumulate", "order"),
    [
        *((FABRICS[0], "bf16_stochastic", order) for order in ORDERS),
        (FABRICS[0], "fp32", ORDERS[2]),
        (FABRICS[1], "bf16_stochastic", ORDERS[0]),
    ],
)
def test_fabric_sums_in_the_format_that_was_asked_for(package, accumulate, order):
    plugin = plugin_of(host(package), accumulate=accumulate)
    fabric = host(package).Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    module = Summing()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = set_up(fabric, module, optimizer, order)
    for number, x in enumerate(THOUSANDTHS):
        with fabric.no_backward_sync(model, enabled=number < 999):
            fabric.backward(model(x))
    assert_summed(module.w.grad, accumulate)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    torch.testing.assert_close(
        torch_bf16.total_norm(module.parameters()), torch.tensor(1.0), atol=0.005, rtol=0
    )
    optimizer.step()
    optimizer.zero_grad()
    assert module.w.grad is None


class Around(torch.optim.Optimizer):
    """Has the groups of what it wraps, as SAM and Lookahead do."""

    def __init__(self, base):
        super().__init__(base.param_groups, base.defaults)
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure=None):
        return self.base.step(closure)


def assert_steps_inside_backward(fabric, module, optimizer, order):
    """Set up the module and the optimizer in some order; releases begin in any."""
    model, wrapped = set_up(fabric, module, optimizer, order)
    fabric.backward(model(torch.randn(2, 8)).square().sum())
    assert module.weight.grad is None
    wrapped.step()
    (ours,) = plugin_api.held_optimizers(optimizer)
    assert float(ours.state[module.weight]["step"]) == 1.0


@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
def test_gradients_of_an_optimizer_inside_another_are_released(fabric_package, order):
    plugin = plugin_of(fabric_package, release_gradients=True)
    fabric = fabric_package.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    module = nn.Linear(8, 4)
    adamw = torch_bf16.convert(torch.optim.AdamW(module.parameters()), plugin.recipe, model=module)
    assert_steps_inside_backward(fabric, module, Around(adamw), order)


def weights_after(pl, data, fit=None, **options):
    module = make_module(pl)
    plugin = plugin_of(pl, **options)
    scheduled = {"lr_scheduler": None}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        self.made = [optimizer]
        scheduled["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": scheduled["lr_scheduler"]}

    type(module).configure_optimizers = configure_optimizers
    trainer = make_trainer(pl, None, plugins=[plugin], max_epochs=2, **(fit or {}))
    trainer.fit(module, data)
    return module, trainer


@pytest.mark.parametrize("accumulate", ["bf16_nearest", "bf16_stochastic", "fp32"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_released_sums_train_the_same_bits(pl, accumulate, scheduled):
    """Five batches an epoch, so that a step is of fewer passes, and more in the second epoch."""

    def fit():
        if not scheduled:
            return {"accumulate_grad_batches": 2}
        scheduler = pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 3})
        return {"callbacks": [scheduler]}

    data = batches(5)
    plain, _ = weights_after(pl, data, fit(), accumulate=accumulate)
    released, _ = weights_after(pl, data, fit(), accumulate=accumulate, release_gradients=True)
    for one, other in zip(plain.parameters(), released.parameters(), strict=True):
        assert torch.equal(one, other)


def test_released_gradients_train_the_same_bits(pl):
    data = batches(6)
    plain, _ = weights_after(pl, data)
    released, trainer = weights_after(pl, data, release_gradients=True)
    assert trainer.global_step == 12
    for one, other in zip(plain.parameters(), released.parameters(), strict=True):
        assert torch.equal(one, other)
    assert all(p.grad is None for p in released.parameters())


def test_released_gradients_train_the_same_bits_in_fabric(fabric_package):
    ends = []
    for release in (False, True):
        plugin = plugin_of(fabric_package, release_gradients=release)
        fabric = fabric_package.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
        for x, y in batches(4):
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            assert all((p.grad is None) == release for p in module.parameters())
            optimizer.step()
        ends.append([p.detach().clone() for p in module.parameters()])
    assert all(map(torch.equal, *ends))


def test_a_module_that_steps_by_itself_names_the_passes_of_its_released_steps(pl):
    def training_step(self, batch, batch_idx):
        self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
        if batch_idx % 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()

    ends = []
    for release in (False, True):
        given = {"release_gradients": True, "release_accumulation_steps": 2} if release else {}
        module = make_module(pl, training_step=training_step)
        module.automatic_optimization = False
        make_trainer(pl, None, plugins=[plugin_of(pl, **given)]).fit(module, batches(4))
        ends.append([*module.parameters()])
    assert all(map(torch.equal, *ends))


def test_released_sums_train_the_same_bits_in_fabric(fabric_package):
    ends = []
    for release in (False, True):
        given = {"release_gradients": True, "release_accumulation_steps": 2} if release else {}
        plugin = plugin_of(fabric_package, accumulate="bf16_stochastic", **given)
        fabric = fabric_package.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
        for number, (x, y) in enumerate(batches(4)):
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            steps = number % 2 == 1
            assert all((p.grad is None) == (release and steps) for p in module.parameters())
            if steps:
                optimizer.step()
                optimizer.zero_grad()
        ends.append([p.detach().clone() for p in module.parameters()])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("again", [True, False])
def test_another_fit_has_other_released_steps_or_none(pl, again):
    """After an evaluation and by the same Trainer, or by another one with a copy's bits."""
    module, trainer = weights_after(pl, batches(3), release_gradients=True)
    trainer.test(module, batches(1), verbose=False)
    after = {name: value.clone() for name, value in module.state_dict().items()}
    module(batches(1).dataset[0][0]).square().sum().backward()
    assert all(torch.equal(after[name], value) for name, value in module.state_dict().items())
    module.zero_grad()

    copy = make_module(pl).bfloat16()
    for each in (module, copy):
        # Also the module, which would go on from the vectors' masters of its first fit.
        each.load_state_dict(after)
        type(each).configure_optimizers = lambda self: torch.optim.AdamW(self.parameters(), lr=0.01)
    other = make_trainer(pl, None, plugins=[plugin_of(pl, release_gradients=again)])
    other.fit(module, batches(4, seed=1))
    if again:
        trainer.fit_loop.max_epochs = 3
        trainer.fit(copy, batches(4, seed=1))
    else:
        make_trainer(pl, "bf16-stochastic").fit(copy, batches(4, seed=1))
    for one, two in zip(module.parameters(), copy.parameters(), strict=True):
        assert torch.equal(one, two)
        assert (one.grad is None) == again


# None: by the Fabric that has set up the first.
@pytest.mark.parametrize("release", [True, False, None])
def test_an_optimizer_that_fabric_is_given_later_takes_the_released_steps_over(
    fabric_package, release
):
    def fabric(release):
        plugin = plugin_of(fabric_package, release_gradients=release)
        return fabric_package.Fabric(accelerator="cpu", devices=1, plugins=[plugin])

    module = nn.Linear(8, 4)
    first, last = (torch.optim.AdamW(module.parameters(), lr=0.01) for _ in range(2))
    one = fabric(True)
    model, _ = one.setup(module, first)
    if release is None:
        optimizer = one.setup_optimizers(last)
    else:
        one = fabric(release)
        model, optimizer = one.setup(module, last)
    one.backward(model(torch.randn(2, 8)).square().sum())
    assert (module.weight.grad is None) == (release is not False)
    optimizer.step()
    assert not first.state
    assert last.state


@pytest.mark.parametrize("order", ORDERS[1:], ids=", ".join)
def test_gradients_of_what_was_set_up_apart_are_released(fabric_package, order):
    plugin = plugin_of(fabric_package, release_gradients=True)
    fabric = fabric_package.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    module = nn.Linear(8, 4)
    adamw = torch.optim.AdamW(module.parameters(), lr=0.01)
    assert_steps_inside_backward(fabric, module, adamw, order)


def test_two_optimizers_of_one_setup_cannot_release_the_same_gradients(fabric_package):
    plugin = plugin_of(fabric_package, release_gradients=True)
    fabric = fabric_package.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    module = nn.Linear(8, 4)
    both = [torch.optim.SGD(module.parameters(), lr=0.01) for _ in range(2)]
    fabric.setup_module(module)
    with pytest.raises(NotImplementedError, match="another optimizer has released"):
        fabric.setup_optimizers(*both)


def test_what_cannot_be_released_is_refused_before_training(pl):
    module = make_module(pl)
    plugin = plugin_of(pl, release_gradients=True)
    trainer = make_trainer(pl, None, plugins=[plugin], gradient_clip_val=1.0)
    with pytest.raises(NotImplementedError, match=r"gradient_clip_val=1\.0.* was cast$"):
        trainer.fit(module, batches(2))
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_only_schedulers_of_accumulation_say_how_many_passes_make_a_released_step(pl):
    class Own(pl.Callback):
        scheduling = {"lr": "cosine", "warmup": 100}  # noqa: RUF012

    plugin, module = plugin_of(pl, release_gradients=True), make_module(pl)
    make_trainer(pl, None, plugins=[plugin], callbacks=[Own()]).fit(module, batches(3))
    assert module.made[0].state[module.net[0].weight]["step"] == 3


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_step_by_hand_clips_no_gradients_that_were_released(pl, algorithm):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.net(batch[0]).square().mean())
        self.clip_gradients(optimizer, 0.1, algorithm)

    module = make_module(pl, training_step=training_step)
    module.automatic_optimization = False
    trainer = make_trainer(pl, None, plugins=[plugin_of(pl, release_gradients=True)])
    with pytest.raises(
        NotImplementedError, match=r"^the gradients were .* BF16Precision\(release_"
    ):
        trainer.fit(module, batches(1))


def test_options_that_exclude_each_other_or_are_unknown_are_refused():
    with pytest.raises(ValueError, match="accumulate='int4' is not a format"):
        lightning_bf16.BF16Precision(accumulate="int4")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"release_max_norm": 1.0}, "release_max_norm=1.0 is for released gradients"),
        ({"release_norm": "last_step"}, "release_norm='last_step' is for released gradients"),
        ({"release_accumulation_steps": 4}, "release_accumulation_steps=4 is for released"),
        ({"release_gradients": "no"}, "release_gradients='no' must be True, False or None"),
        ({"release_gradients": True, "release_max_norm": -1.0}, "release_max_norm=-1.0 must be"),
        ({"release_gradients": True, "release_norm": "all"}, "release_norm='all' is unknown; use"),
        ({"release_gradients": True, "release_accumulation_steps": 0}, "steps=0 must be an int"),
        ({"release_gradients": True, "release_accumulation_steps": "four"}, "='four' must be an"),
    ],
)
def test_options_of_released_gradients_that_cannot_be_meant_are_refused(options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        lightning_bf16.BF16Precision(**options)


@pytest.mark.parametrize(
    "clip", [{"clip_val": 1.0}, {"max_norm": 1.0, "norm_type": 1.0}, {"max_norm": 1.0}]
)
def test_fabric_clips_no_gradients_that_were_released(fabric_package, clip):
    plugin = plugin_of(fabric_package, release_gradients=True)
    fabric = fabric_package.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model = torch.nn.Linear(4, 4)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    fabric.backward(model(torch.ones(2, 4)).sum())
    with pytest.raises(
        NotImplementedError, match=r"^the gradients were .* BF16Precision\(release_"
    ):
        fabric.clip_gradients(model, optimizer, **clip)


@pytest.mark.parametrize("weights", ["bf16_stochastic", "bf16+16", "bf16+fp32"])
def test_every_field_of_a_recipe_is_an_option(pl, weights):
    module = make_module(pl)
    options = {
        "weights": weights, "exp_avg": "fp32", "exp_avg_sq": "bf16_stochastic",
        "keep_fp32": ["net.3"], "seed": 5, "accumulate": "fp32",
    }  # fmt: skip
    make_trainer(pl, None, plugins=[plugin_of(pl, **options)]).fit(module, batches(2))
    recipe = module.made[0].recipe
    assert (recipe.weights, recipe.exp_avg, recipe.seed) == (weights, "fp32", 5)
    assert (recipe.exp_avg_sq, recipe.accumulate) == ("bf16_stochastic", "fp32")
    state = module.made[0].state[module.net[0].weight]
    assert state["exp_avg"].dtype == torch.float32
    assert state["exp_avg_sq"].dtype == torch.bfloat16
    assert module.net[3].weight.dtype == torch.float32
