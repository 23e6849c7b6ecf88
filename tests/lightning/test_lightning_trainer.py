"""A fit, a validation and a prediction, on one device, in both packages and both modes."""

from __future__ import annotations

import gc
import logging
import pickle
import warnings
import weakref

import pytest
import torch
from lightning_models import MODES, TRAINERS, batches, host, loader, make_module, make_trainer
from torch import nn
from torch.nn import functional as F

import lightning_bf16
import torch_bf16


def test_fit_trains_bf16_weights_to_a_lower_loss(pl, mode):
    data = batches(2, repeat=20)
    module = make_module(pl)
    with torch.no_grad():
        before = sum(F.cross_entropy(module(x), y) for x, y in data)
    trainer = make_trainer(pl, mode)
    trainer.fit(module, data)
    with torch.no_grad():
        after = sum(F.cross_entropy(module.float()(x), y) for x, y in data)
    assert after < 0.5 * before
    assert trainer.global_step == len(data)


def test_fit_keeps_the_identity_of_optimizer_and_parameters(pl, mode):
    module = make_module(pl)
    parameters = list(module.parameters())
    trainer = make_trainer(pl, mode)
    trainer.fit(module, batches(2))
    assert [id(p) for p in module.parameters()] == [id(p) for p in parameters]
    assert {p.dtype for p in parameters} == {torch.bfloat16}
    assert trainer.optimizers == module.made
    assert isinstance(module.made[0], torch_bf16.AdamW)
    assert isinstance(module.made[0], torch.optim.AdamW)
    assert module.made[0].recipe == torch_bf16.get_recipe(mode)
    group = module.made[0].param_groups[0]
    assert [id(p) for p in group["params"]] == [id(p) for p in parameters]


def test_the_loss_is_fp32_also_where_the_step_computes_in_bf16(pl):
    reached = []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        assert loss.dtype == torch.bfloat16
        return {"loss": loss, "logits": self(batch[0])}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        reached.extend([outputs["loss"].dtype, outputs["logits"].dtype])

    hooks = {"training_step": training_step, "on_train_batch_end": on_train_batch_end}
    module = make_module(pl, **hooks)
    make_trainer(pl, "bf16-stochastic").fit(module, batches(1))
    assert reached == [torch.float32, torch.float32]


def test_logits_of_forward_and_losses_of_the_step_are_fp32(pl, mode):
    module = make_module(pl)
    logits = []
    module.register_forward_hook(lambda _, args, output: logits.append(output.dtype))
    make_trainer(pl, mode).fit(module, batches(2))
    assert module.seen == [torch.float32] * 2
    assert logits == [torch.float32] * 2


def test_inputs_and_targets_are_not_rounded(pl):
    seen = []

    def training_step(self, batch, batch_idx):
        seen.append(batch)
        return self.net(batch["x"]).sum()

    batch = {"x": torch.full((1, 8), 1000.3), "time": torch.tensor(257.0, dtype=torch.float64)}
    make_trainer(pl, "bf16-stochastic").fit(
        make_module(pl, training_step=training_step), loader([batch])
    )
    assert torch.equal(seen[0]["x"], batch["x"])
    assert seen[0]["time"].dtype == torch.float64


def test_predictions_are_fp32_arrays(pl, mode):
    module = make_module(pl)
    predictions = make_trainer(pl, mode).predict(module, batches(2))
    assert predictions[0].numpy().dtype == "float32"
    assert "predict_step" not in vars(module)
    assert module.float()(torch.ones(2, 8)).dtype == torch.float32


def test_validation_runs_within_a_fit_and_alone(pl, mode):
    module = make_module(pl)
    trainer = make_trainer(pl, mode, max_epochs=2)
    trainer.fit(module, batches(2), batches(2, seed=1))
    within = trainer.callback_metrics["val_loss"]
    alone = trainer.validate(module, batches(2, seed=1), verbose=False)[0]["val_loss"]
    assert within.dtype == torch.float32
    assert within.item() == alone
    assert trainer.test(module, batches(2, seed=1), verbose=False)[0]["test_loss"] == alone


@pytest.mark.parametrize("kind", ["step", "sequential", "plateau"])
def test_schedulers_built_in_configure_optimizers_work_as_in_32_true(pl, kind):
    rates: list[float] = []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.9)
        schedulers = torch.optim.lr_scheduler
        if kind == "step":
            scheduler = schedulers.StepLR(optimizer, 1, gamma=0.5)
        elif kind == "sequential":
            parts = [schedulers.ConstantLR(optimizer, 0.5), schedulers.StepLR(optimizer, 1, 0.5)]
            scheduler = schedulers.SequentialLR(optimizer, parts, [1])
        else:
            scheduler = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        config = {"scheduler": scheduler, "interval": "step", "monitor": "flat"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def training_step(self, batch, batch_idx):
        self.log("flat", 1.0)
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_train_batch_end(self, *_):
        rates.append(self.optimizers().param_groups[0]["lr"])

    def rates_of(precision):
        rates.clear()
        module = make_module(
            pl,
            configure_optimizers=configure_optimizers,
            training_step=training_step,
            on_train_batch_end=on_train_batch_end,
        )
        trainer = make_trainer(pl, precision)
        trainer.fit(module, batches(4))
        return list(rates), type(trainer.optimizers[0])

    stock, _ = rates_of("32-true")
    ours, optimizer = rates_of("bf16-stochastic")
    assert optimizer is torch_bf16.SGD
    assert ours == stock
    assert len(set(ours)) > 1


def test_manual_optimization_with_two_optimizers_trains_both(pl):
    def configure_optimizers(self):
        first, last = self.net[0], self.net[3]
        return [
            torch.optim.SGD(first.parameters(), lr=0.1),
            torch.optim.Adam(last.parameters(), lr=0.1),
        ]

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    hooks = {"configure_optimizers": configure_optimizers, "training_step": training_step}
    module = make_module(pl, **hooks)
    module.automatic_optimization = False
    before = [module.net[i].weight.detach().bfloat16() for i in (0, 3)]
    trainer = make_trainer(pl, "bf16-fp32-master")
    trainer.fit(module, batches(3))
    assert [type(o) for o in trainer.optimizers] == [torch_bf16.SGD, torch_bf16.Adam]
    for old, i in zip(before, (0, 3), strict=True):
        assert not torch.equal(old, module.net[i].weight)


def _set_up_again(module):
    module.trainer.strategy.setup_optimizers(module.trainer)


def _replace(module):
    module.trainer.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]


@pytest.mark.parametrize("made", [_set_up_again, _replace])
def test_an_optimizer_that_is_made_in_a_hook_trains_in_the_mode(pl, mode, made):
    module = make_module(pl, on_train_start=made)
    trainer = make_trainer(pl, mode)
    trainer.fit(module, batches(3))
    assert isinstance(trainer.optimizers[0], torch_bf16.BF16Optimizer)
    assert trainer.optimizers[0].recipe.name == mode
    assert trainer.optimizers[0].state


def test_an_optimizer_that_the_trainer_never_sees_is_warned_about(pl):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)
        self.hidden = getattr(self, "hidden", None) or torch.optim.SGD(self.parameters(), lr=0.1)
        self.hidden.step()

    module = make_module(pl, training_step=training_step)
    module.automatic_optimization = False
    with pytest.warns(UserWarning, match="SGD steps over bfloat16.*Return it from configure_optim"):
        make_trainer(pl, "bf16-stochastic").fit(module, batches(2))


def test_the_advice_is_the_plugins_again_after_a_fit_of_what_was_fp32_in_between(pl, mode):
    def step(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(torch.ones(1, 8)).sum().backward()
        optimizer.step()

    module = make_module(pl)
    trainer = make_trainer(pl, mode)
    trainer.fit(module, batches(1))
    module.float()
    make_trainer(pl, plugins=[trainer.precision_plugin]).fit(module, batches(1))
    with pytest.warns(UserWarning, match="SGD steps over bfloat16.*Return it from configure_optim"):
        step(module)
    lightning_bf16.unregister()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(module)
    finally:
        lightning_bf16.register()


def test_a_plugin_that_is_kept_keeps_no_module_and_a_module_goes_on_from_its_masters(pl):
    def configure(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    module = make_module(pl, configure_optimizers=configure)
    module.lr = 0.1
    trainer = make_trainer(pl, "bf16-fp32-master")
    plugin = trainer.precision_plugin
    trainer.fit(module, batches(2))
    exact = torch_bf16.fp32_state_dict(module, trainer.optimizers[0])
    module.trainer, module.lr = None, 0.0
    del trainer  # now nothing else holds the optimizer
    gc.collect()
    again = make_trainer(pl, plugins=[plugin])
    again.fit(module, batches(1))
    found = torch_bf16.fp32_state_dict(module, again.optimizers[0])
    assert all(torch.equal(found[name], exact[name]) for name in exact)
    kept = [weakref.ref(module), weakref.ref(again.optimizers[0])]
    del module, again
    gc.collect()
    assert [each() for each in kept] == [None, None]


def test_a_module_without_optimizer_and_one_with_our_own_are_left_alone(pl):
    def none(self):
        return None

    def own(self):
        return torch_bf16.AdamW(self.parameters(), recipe=recipe)

    recipe = torch_bf16.get_recipe("bf16-fp32-master", name="of the script")
    module = make_module(pl, configure_optimizers=none)
    with pytest.warns(UserWarning, match="this fit will run with no optimizer"):
        make_trainer(pl, "bf16-stochastic").fit(module, batches(1))
    # Neither its name, nor its seed, nor what the plugin keeps in fp32 is a matter of its formats.
    plugin = _plugin_class(pl)("bf16-fp32-master", keep_fp32=["net.3"], seed=7)
    trainer = make_trainer(pl, plugins=[plugin])
    trainer.fit(make_module(pl, configure_optimizers=own), batches(1))
    assert trainer.optimizers[0].recipe is recipe


def test_lean_compute_casts_inputs_and_runs_without_autocast(pl):
    plugin = _plugin_class(pl)("bf16-stochastic", compute="bf16")
    seen = []

    def training_step(self, batch, batch_idx):
        seen.append((batch[0].dtype, self(batch[0]).dtype, torch.is_autocast_enabled("cpu")))
        return F.cross_entropy(self(batch[0]), batch[1])

    trainer = make_trainer(pl, plugins=[plugin])
    trainer.fit(make_module(pl, training_step=training_step), batches(1))
    assert seen == [(torch.bfloat16, torch.bfloat16, False)]


def plain(self):
    return torch.optim.AdamW(self.parameters())


def of_ours(self):
    return torch_bf16.AdamW(self.parameters(), recipe=self.trainer.precision_plugin.mode)


def converted(self):
    return torch_bf16.convert(plain(self), self.trainer.precision_plugin.recipe, model=self)


# Each mode and each package with some: no line depends on either.
@pytest.mark.parametrize(
    ("package", "mode", "made", "late"),
    [
        (TRAINERS[0], MODES[0], plain, False),
        (TRAINERS[1], MODES[1], plain, True),
        (TRAINERS[0], MODES[1], of_ours, False),
        (TRAINERS[1], MODES[0], of_ours, True),
        (TRAINERS[0], MODES[0], converted, False),
    ],
)
def test_one_line_tells_what_is_trained_how(package, mode, made, late, caplog):
    def on_train_start(self):
        if late:
            self.trainer.strategy.optimizers = [made(self)]

    pl = host(package)
    module = make_module(pl, configure_optimizers=made, on_train_start=on_train_start)
    plugin = _plugin_class(pl)(mode, compute="fp32")
    with caplog.at_level(logging.INFO):
        make_trainer(pl, plugins=[plugin]).fit(module, batches(2))
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith(mode)]
    assert len(lines) == 1 + late
    assert all("bytes per trained parameter" in each for each in lines)
    assert all("computes in fp32" in each for each in lines)


def test_of_several_optimizers_each_says_what_it_trains(pl, caplog):
    def configure_optimizers(self):
        first, *_, last = self.net
        return torch.optim.AdamW(first.parameters()), torch.optim.SGD(last.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()
            optimizer.zero_grad()

    own = {"configure_optimizers": configure_optimizers, "training_step": training_step}
    module = make_module(pl, **own)
    module.automatic_optimization = False
    with caplog.at_level(logging.INFO):
        make_trainer(pl, "bf16-stochastic").fit(module, batches(1))
    lines = [r.getMessage() for r in caplog.records if "per trained parameter" in r.getMessage()]
    for line, part, states in zip(lines, (module.net[0], module.net[-1]), (2, 0), strict=True):
        count = sum(p.numel() for p in part.parameters())
        assert line.startswith(f"bf16-stochastic: {count} parameters ")
        assert line.count("exp_avg") == states


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_says_that_it_casts_the_module(pl, stage, caplog):
    module = make_module(pl)
    with caplog.at_level(logging.INFO):
        run = getattr(make_trainer(pl, "bf16-stochastic"), stage)
        run(module, batches(1), **({} if stage == "predict" else {"verbose": False}))
        run(module, batches(1), **({} if stage == "predict" else {"verbose": False}))
    lines = [r.getMessage() for r in caplog.records if "casts the parameters" in r.getMessage()]
    assert len(lines) == 1
    assert f"trainer.{stage} casts" in lines[0]


def test_evaluation_is_silent_about_a_module_that_was_cast_already(pl, caplog):
    # Batch norm stays fp32 for good; that alone is nothing that the evaluation casts.
    module = make_module(pl)
    module.net.append(nn.BatchNorm1d(4))
    make_trainer(pl, "bf16-stochastic").fit(module, batches(1))
    assert torch.float32 in {p.dtype for p in module.parameters()}
    with caplog.at_level(logging.INFO):
        make_trainer(pl, "bf16-stochastic").test(module, batches(1), verbose=False)
    assert not [r for r in caplog.records if "casts the parameters" in r.getMessage()]


def test_the_precision_that_lightning_sees_is_bf16_true(pl, mode):
    trainer = make_trainer(pl, mode)
    assert trainer.precision == "bf16-true"
    assert trainer.precision_plugin.mode == torch_bf16.get_recipe(mode).name


def test_a_used_plugin_can_be_pickled(pl):
    trainer = make_trainer(pl, "bf16-stochastic")
    trainer.fit(make_module(pl), batches(1))
    copy = pickle.loads(pickle.dumps(trainer.precision_plugin))
    assert type(copy) is type(trainer.precision_plugin)
    assert (copy.recipe, copy.compute) == (trainer.precision_plugin.recipe, "autocast")


def test_a_plugin_takes_the_recipes_options(pl):
    plugin = _plugin_class(pl)("bf16-fp32-master", keep_fp32=["net.3"], seed=7)
    module = make_module(pl)
    trainer = make_trainer(pl, plugins=[plugin])
    trainer.fit(module, batches(1))
    assert module.net[0].weight.dtype == torch.bfloat16
    assert module.net[3].weight.dtype == torch.float32
    assert trainer.optimizers[0].recipe.seed == 7


def _plugin_class(pl):
    families = {
        "lightning.pytorch": "lightning_bf16.pytorch",
        "pytorch_lightning": "lightning_bf16.pytorch_lightning",
    }
    return host(families[pl.__name__]).BF16Precision
