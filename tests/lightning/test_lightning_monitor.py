"""The callback logs what rounding does, through the Trainer's own logging."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from lightning_models import batches, make_module, make_trainer

import torch_bf16


def monitor_of(pl, **options):
    name = "pytorch" if pl.__name__.startswith("lightning.") else "pytorch_lightning"
    return importlib.import_module(f"lightning_bf16.{name}").BF16Monitor(**options)


@pytest.fixture
def logged(pl, mode):
    """Metrics by step of a fit of ten steps, each of two batches."""

    def fit(callback, **options):
        logger_class = importlib.import_module(f"{pl.__name__}.loggers.logger").DummyLogger
        rows = []

        class Recorder(logger_class):
            def log_metrics(self, metrics, step=None):
                rows.append((step, {k: v for k, v in metrics.items() if k.startswith("bf16/")}))

        trainer = make_trainer(
            pl,
            mode,
            logger=Recorder(),
            callbacks=[callback],
            accumulate_grad_batches=2,
            **options,
        )
        trainer.fit(make_module(pl), batches(20))
        assert trainer.global_step == 10
        return [(step, metrics) for step, metrics in rows if metrics]

    return fit


def test_every_logged_step_has_the_metrics_of_each_layer(pl, mode, logged):
    rows = logged(monitor_of(pl), log_every_n_steps=4)
    assert len(rows) == 2
    for _, metrics in rows:
        layers = {name.split("/", 2)[2] for name in metrics if "/survived/" in name}
        assert layers == {"net.0", "net.1", "net.3"}
        assert metrics["bf16/gradient_norm"] > 0
        assert metrics["bf16/skipped_steps"] == 0
        if mode == "bf16-fp32-master":
            assert all(metrics[f"bf16/survived/{layer}"] == 1 for layer in layers)


def trainer_with(*optimizers):
    return SimpleNamespace(optimizers=[*optimizers], precision_plugin=None)


def test_a_refused_monitor_leaves_none_on_other_optimizers(pl, mode):
    models = [torch_bf16.cast_model(torch.nn.Linear(4, 4), mode) for _ in range(2)]
    first, second = (torch_bf16.AdamW(each.parameters(), recipe=mode) for each in models)
    torch_bf16.release_gradients(models[1], second)
    monitor, trainer = monitor_of(pl), trainer_with(first, second)
    with pytest.raises(ValueError, match="gradients are released"):
        monitor.on_train_start(trainer, None)
    monitor.on_exception(trainer, None, None)
    assert not first.observers


def test_an_optimizer_inside_another_is_watched(pl, mode):
    class Around(torch.optim.Optimizer):
        def __init__(self, base):
            super().__init__(base.param_groups, {})
            self.base = base

    model = torch_bf16.cast_model(torch.nn.Linear(4, 4), mode)
    ours = torch_bf16.AdamW(model.parameters(), recipe=mode)
    monitor, trainer = monitor_of(pl), trainer_with(Around(ours))
    monitor.on_train_start(trainer, None)
    assert len(ours.observers) == 1


def test_of_several_optimizers_each_is_measured_at_logged_steps_alone(pl, mode):
    measured = {}

    def configure_optimizers(self):
        first, *_, last = self.net
        return [torch.optim.SGD(each.parameters(), lr=1.0) for each in (first, last)]

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.net(batch[0]).square().mean())
            optimizer.step()

    def log_dict(self, metrics, **_):
        measured[self.trainer.fit_loop.batch_idx] = {name.split("/")[1] for name in metrics}

    hooks = [configure_optimizers, training_step, log_dict]
    module = make_module(pl, **{each.__name__: each for each in hooks})
    module.automatic_optimization = False
    trainer = make_trainer(pl, mode, callbacks=[monitor_of(pl)], log_every_n_steps=2)
    trainer.fit(module, batches(5))
    assert measured == {batch: {"optimizer_0", "optimizer_1"} for batch in (1, 3)}


def test_an_optimizer_that_a_hook_makes_later_is_not_measured(pl, mode):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1)]

    module = make_module(pl, on_train_batch_start=on_train_batch_start)
    trainer = make_trainer(pl, mode, callbacks=[monitor_of(pl)], log_every_n_steps=1)
    trainer.fit(module, batches(3))
    assert isinstance(trainer.optimizers[0], torch_bf16.SGD)
    assert not trainer.optimizers[0].observers


def test_a_second_fit_has_the_metrics_of_its_own_optimizer(pl, mode, logged):
    callback = monitor_of(pl)
    names = [{*logged(callback, log_every_n_steps=5)[-1][1]} for _ in range(2)]
    assert names[0] == names[1]


def test_an_interval_of_its_own(pl, mode, logged):
    rows = logged(monitor_of(pl, every=5), log_every_n_steps=1)
    # The Trainer repeats the last value at every step that it logs.
    norms = {step: metrics["bf16/gradient_norm"] for step, metrics in rows}
    assert min(norms) == 4
    assert len({norms[step] for step in range(4, 9)}) == 1
    assert norms[9] != norms[8]


def test_a_run_that_releases_gradients_is_told_that_it_has_no_figures(pl, monkeypatch):
    monkeypatch.setenv("BF16_RELEASE_GRADIENTS", "1")
    trainer = make_trainer(pl, "bf16-stochastic", callbacks=[monitor_of(pl)])
    with pytest.warns(UserWarning, match=r"logs nothing .*BF16Precision\(release_gradients=True\)"):
        trainer.fit(make_module(pl), batches(2))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_run_in_which_nothing_is_watched_is_told(pl, precision):
    trainer = make_trainer(pl, precision, callbacks=[monitor_of(pl, every=2)])
    with pytest.warns(UserWarning, match=f"BF16Monitor logs nothing .* precision='{precision}'"):
        trainer.fit(make_module(pl), batches(2))
