"""A resumed run equals the uninterrupted one, bit for bit."""

from __future__ import annotations

import inspect

import pytest
import torch
from lightning_models import (
    batches,
    differences,
    host,
    make_module,
    make_trainer,
    network,
    snapshot,
)
from torch.nn import functional as F

import torch_bf16

FABRIC_OF = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def configure_optimizers(self):
    self.made = [torch.optim.AdamW(self.parameters(), lr=1e-2)]
    return self.made, [torch.optim.lr_scheduler.StepLR(self.made[0], 1, gamma=0.5)]


def fit(pl, mode, epochs, checkpoint=None, seed=0):
    module = make_module(pl, seed=seed, configure_optimizers=configure_optimizers)
    trainer = make_trainer(pl, mode, max_epochs=epochs, gradient_clip_val=0.5)
    trainer.fit(module, batches(5), ckpt_path=checkpoint)
    return trainer, snapshot(module, module.made[0])


def test_trainer_resumed_at_step_k_equals_the_uninterrupted_run(pl, mode, tmp_path):
    _, uninterrupted = fit(pl, mode, epochs=2)
    trainer, halfway = fit(pl, mode, epochs=1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    # Another initialisation, so that what is not restored shows.
    resumed_trainer, resumed = fit(pl, mode, epochs=2, checkpoint=tmp_path / "half.ckpt", seed=99)
    assert resumed_trainer.global_step == 10
    assert differences(uninterrupted, resumed) == []
    assert differences(halfway, resumed)


def test_a_checkpoint_of_before_the_first_step_keeps_the_bits_that_the_cast_took(
    pl, mode, tmp_path
):
    class Saves(pl.Callback):
        def on_train_start(self, trainer, _):
            trainer.save_checkpoint(tmp_path / "start.ckpt")

    module = make_module(pl, configure_optimizers=configure_optimizers)
    make_trainer(pl, mode, max_epochs=1, gradient_clip_val=0.5, callbacks=[Saves()]).fit(
        module, batches(5)
    )
    _, resumed = fit(pl, mode, epochs=1, checkpoint=tmp_path / "start.ckpt", seed=99)
    assert differences(snapshot(module, module.made[0]), resumed) == []


def test_fabric_resumed_at_step_k_equals_the_uninterrupted_run(pl, mode, tmp_path):
    package = host(FABRIC_OF[pl.__name__])
    fabric = package.Fabric(accelerator="cpu", devices=1, precision=mode)

    def start(seed):
        torch.manual_seed(seed)
        model = network()
        return fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train(model, optimizer, data):
        for x, y in data:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(x), y))
            optimizer.step()

    first, second = list(batches(4)), list(batches(4, seed=1))
    model, optimizer = start(0)
    train(model, optimizer, first)
    fabric.save(tmp_path / "half.ckpt", {"model": model, "optimizer": optimizer})
    train(model, optimizer, second)

    resumed, its_optimizer = start(99)
    fabric.load(tmp_path / "half.ckpt", {"model": resumed, "optimizer": its_optimizer})
    train(resumed, its_optimizer, second)
    assert (
        differences(
            snapshot(model.module, optimizer.optimizer),
            snapshot(resumed.module, its_optimizer.optimizer),
        )
        == []
    )


def test_a_checkpoint_holds_the_plugins_own_state_and_loads_with_weights_only(pl, mode, tmp_path):
    trainer, _ = fit(pl, mode, epochs=1)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    saved = torch.load(tmp_path / "some.ckpt", weights_only=True)
    assert saved["BF16Precision"] == {
        "mode": trainer.precision_plugin.mode,
        "seed": 0,
        "compute": "autocast",
    }
    assert {t.dtype for t in saved["state_dict"].values()} == {torch.bfloat16}


def test_a_run_resumes_with_weights_only_and_validates_a_file_of_weights_alone(pl, mode, tmp_path):
    module = make_module(pl, seed=0, configure_optimizers=configure_optimizers)
    trainer = make_trainer(pl, mode, max_epochs=1)
    trainer.fit(module, batches(5), batches(2, seed=1))
    trainer.save_checkpoint(tmp_path / "all.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)

    losses = make_trainer(pl, mode).validate(
        make_module(pl, seed=99), batches(2, seed=1), tmp_path / "weights.ckpt", verbose=False
    )
    assert losses[0]["val_loss"] == trainer.callback_metrics["val_loss"].item()

    options = {}
    if "weights_only" in inspect.signature(trainer.fit).parameters:
        options["weights_only"] = True
    resumed = make_trainer(pl, mode, max_epochs=2)
    other = make_module(pl, seed=99, configure_optimizers=configure_optimizers)
    resumed.fit(other, batches(5), ckpt_path=tmp_path / "all.ckpt", **options)
    assert resumed.global_step == 10


def test_the_weights_of_a_checkpoint_train_on_in_32_true(pl, mode, tmp_path):
    trainer, _ = fit(pl, mode, epochs=1)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    module = make_module(pl)
    module.load_state_dict(torch.load(tmp_path / "some.ckpt", weights_only=True)["state_dict"])
    make_trainer(pl, "32-true").fit(module, batches(1))
    assert next(module.parameters()).dtype == torch.float32


def test_the_checkpoint_of_another_recipe_goes_on_and_says_what_was_rounded(pl, tmp_path, caplog):
    trainer, _ = fit(pl, "bf16-fp32-master", epochs=1)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    resumed, after = fit(pl, "bf16-stochastic", epochs=2, checkpoint=tmp_path / "some.ckpt")
    assert resumed.global_step == 10
    assert "state 0 remainder16" not in after
    assert "weights bf16+16 -> bf16_stochastic" in caplog.text


def never(pl, module):
    pass


def validated(pl, module):
    make_trainer(pl, "bf16-stochastic").validate(module, batches(1), verbose=False)


def of_stock_bf16(pl, module):
    make_trainer(pl, "bf16-true").validate(module, batches(1), verbose=False)


def built_in_bf16(pl, module):
    module.bfloat16()


@pytest.mark.parametrize("used", [never, validated, of_stock_bf16, built_in_bf16])
def test_exact_masters_start_from_a_checkpoint_of_32_true_whatever_the_module_was(
    pl, tmp_path, used
):
    trainer, after = fit(pl, "32-true", epochs=1)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    module = make_module(pl, seed=99, configure_optimizers=configure_optimizers)
    used(pl, module)
    resumed = make_trainer(pl, "bf16-fp32-master", max_epochs=2, limit_train_batches=0)
    resumed.fit(module, batches(5), ckpt_path=tmp_path / "some.ckpt")
    exact = torch_bf16.fp32_state_dict(module, resumed.optimizers[0])
    for name, value in exact.items():
        assert torch.equal(value, after[f"weight {name}"]), name


def test_a_checkpoint_of_32_true_goes_on_in_bf16(pl, mode, tmp_path):
    trainer, _ = fit(pl, "32-true", epochs=1)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    resumed, after = fit(pl, mode, epochs=2, checkpoint=tmp_path / "some.ckpt", seed=99)
    assert resumed.global_step == 10
    assert float(after["state 0 step"]) == 10
    assert after["weight net.0.weight"].dtype == torch.bfloat16


def plugin_of(pl, mode, seed):
    return host(f"lightning_bf16.{pl.__name__.rpartition('.')[2]}").BF16Precision(mode, seed=seed)


def seeds(trainer):
    return trainer.precision_plugin.recipe.seed, trainer.optimizers[0].recipe.seed


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_an_evaluation_of_a_checkpoint_leaves_the_seed_of_later_fits_alone(
    pl, mode, tmp_path, stage
):
    teacher = make_trainer(pl, plugins=[plugin_of(pl, mode, 7)])
    teacher.fit(make_module(pl), batches(1))
    teacher.save_checkpoint(tmp_path / "teacher.ckpt")
    trainer = make_trainer(pl, plugins=[plugin_of(pl, mode, 1)])
    getattr(trainer, stage)(
        make_module(pl), batches(1), ckpt_path=tmp_path / "teacher.ckpt", verbose=False
    )
    trainer.fit(make_module(pl), batches(1))
    assert seeds(trainer) == (1, 1)


def test_a_resumed_fit_says_that_it_takes_the_saved_seed_and_a_later_fit_has_its_own(
    pl, mode, tmp_path, caplog
):
    first = make_trainer(pl, plugins=[plugin_of(pl, mode, 7)])
    first.fit(make_module(pl), batches(1))
    first.save_checkpoint(tmp_path / "first.ckpt")
    trainer = make_trainer(pl, plugins=[plugin_of(pl, mode, 1)], max_epochs=2)
    trainer.fit(make_module(pl), batches(1), ckpt_path=tmp_path / "first.ckpt")
    assert seeds(trainer) == (7, 7)
    assert "seed=7 of the checkpoint takes the place of seed=1" in caplog.text
    trainer.save_checkpoint(tmp_path / "second.ckpt")
    saved = torch.load(tmp_path / "second.ckpt", weights_only=True)
    assert saved["BF16Precision"]["seed"] == 7
    trainer.fit_loop.max_epochs = 4
    trainer.fit(make_module(pl), batches(1))
    assert seeds(trainer) == (1, 1)


def test_options_of_saving_and_loading_reach_the_host(pl, mode, tmp_path):
    module, path = make_module(pl), tmp_path / "part.ckpt"
    trainer = make_trainer(pl, mode)
    trainer.fit(module, batches(2))
    trainer.save_checkpoint(path, weights_only=True)
    saved = torch.load(path, weights_only=False)
    assert "optimizer_states" not in saved
    del saved["state_dict"]["net.0.bias"]
    torch.save(saved, path)
    again = make_module(pl)
    again.strict_loading = False
    make_trainer(pl, mode).validate(again, batches(1), ckpt_path=path, verbose=False)
    assert torch.equal(again.net[3].weight, module.net[3].weight)
