"""What surrounds training: finders, averages, early stopping, compiled modules, checkpoints."""

from __future__ import annotations

import functools
import importlib
import inspect

import pytest
import torch
from lightning_models import (
    MODES,
    batches,
    callback_of,
    callbacks_of,
    make_module,
    make_trainer,
    network,
    tuner_of,
)
from torch.utils.data import DataLoader, TensorDataset

import torch_bf16

MASTER = MODES[1]


def module_with_hyperparameters(pl, **hooks):
    def configure_optimizers(self):
        self.made = [torch.optim.AdamW(self.parameters(), lr=self.lr)]
        return self.made[0]

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(
            torch.randn(64, 8, generator=generator),
            torch.randint(4, (64,), generator=generator),
        )
        return DataLoader(data, batch_size=self.batch_size)

    hooks = {
        "configure_optimizers": configure_optimizers,
        "train_dataloader": train_dataloader,
        "val_dataloader": lambda self: batches(1),
        **hooks,
    }
    module = make_module(pl, **hooks)
    module.lr, module.batch_size = 1e-3, 2
    return module


def test_the_learning_rate_finder_leaves_weights_and_masters_as_they_were(pl, mode, tmp_path):
    module = module_with_hyperparameters(pl)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = make_trainer(pl, mode, default_root_dir=tmp_path)
    found = tuner_of(pl, trainer).lr_find(module, num_training=30, update_attr=True)
    assert len(found.results["loss"]) == 30
    assert module.lr == found.suggestion()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter, before[name].bfloat16(), rtol=0, atol=0)
    module.on_train_start = functools.partial(assert_exact, module, before)
    trainer.fit(module)
    assert isinstance(module.made[0], torch_bf16.AdamW)


def assert_exact(module, expected):
    """What a new fit starts from, where the mode keeps it."""
    optimizer = module.trainer.optimizers[0]
    for name, parameter in module.named_parameters():
        if "remainder16" in optimizer.recipe.format_of("weights", parameter.shape).plane_names(""):
            assert torch.equal(optimizer.exact_weight(parameter), expected[name])


def test_another_fit_starts_from_the_masters_of_the_last_one(pl, mode):
    module = module_with_hyperparameters(pl)
    trainer = make_trainer(pl, mode)
    trainer.fit(module)
    optimizer = trainer.optimizers[0]
    ended = {name: optimizer.exact_weight(p).clone() for name, p in module.named_parameters()}
    assert any(not torch.equal(each, each.bfloat16().float()) for each in ended.values())
    del optimizer
    module.made.clear()
    module.on_train_start = functools.partial(assert_exact, module, ended)
    trainer.fit_loop.max_epochs *= 2
    trainer.fit(module)


def test_the_batch_size_finder_finds_what_it_finds_in_32_true(pl, mode, tmp_path):
    sizes = []
    for precision in (mode, "32-true"):
        module = module_with_hyperparameters(pl)
        trainer = make_trainer(pl, precision, default_root_dir=tmp_path)
        sizes.append(tuner_of(pl, trainer).scale_batch_size(module, max_trials=3))
        assert module.batch_size == sizes[-1] > 2
        trainer.fit(module)
        assert trainer.global_step == 64 // module.batch_size
    assert sizes[0] == sizes[1]


def average_and_what_it_should_be(pl, precision):
    """A moving average of the weights after a fit that ends with the last of four validations.

    Returns its largest distance from one kept by hand, that of the weights that were validated, and
    the share of its elements that are bf16 numbers.
    """
    callbacks = callbacks_of(pl)
    averaging = callback_of(pl, "EMAWeightAveraging")
    average = averaging(decay=0.99, update_every_n_steps=1)
    expected, validated = [], []

    class Follow(callbacks.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            now = [p.detach().float() for p in pl_module.parameters()]
            if not expected:
                expected.extend(each.clone() for each in now)
            for mean, weight in zip(expected, now, strict=True):
                mean.lerp_(weight, 0.01)

        def on_validation_batch_end(self, trainer, pl_module, *args):
            validated.extend(
                (p.detach().float() - mean).abs().max().item()
                for p, mean in zip(pl_module.parameters(), expected, strict=True)
            )

    trainer = make_trainer(pl, precision, callbacks=[Follow(), average], val_check_interval=5)
    trainer.fit(make_module(pl), batches(20), batches(2))
    kept = [p.detach() for p in average._average_model.module.parameters()]
    assert {p.dtype for p in kept} == {torch.float32}
    assert len(validated) == 4 * 2 * len(kept)
    error = max((a - b).abs().max().item() for a, b in zip(kept, expected, strict=True))
    flat = torch.cat([each.flatten() for each in kept])
    return error, max(validated), (flat == flat.bfloat16()).float().mean().item()


def test_an_average_of_weights_is_not_rounded_by_validation(pl, mode):
    error, error_in_validation, rounded = average_and_what_it_should_be(pl, mode)
    assert error < 1e-6
    # What is validated is the average, rounded once: norm gains near 1 by 2**-9.
    assert error_in_validation <= 2**-8
    assert rounded < 0.2


def test_stock_bf16_true_rounds_the_average_at_each_validation(pl):
    _, _, rounded = average_and_what_it_should_be(pl, "bf16-true")
    assert rounded == 1


def test_stochastic_weight_averaging_keeps_an_fp32_average(pl, mode):
    callback = callbacks_of(pl).StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)
    module = make_module(pl)
    trainer = make_trainer(pl, mode, max_epochs=4, callbacks=[callback])
    trainer.fit(module, batches(4))
    assert {p.dtype for p in callback._average_model.parameters()} == {torch.float32}


def test_early_stopping_and_the_best_checkpoint_see_fp32_losses(pl, mode, tmp_path):
    callbacks = callbacks_of(pl)
    best = callbacks.ModelCheckpoint(dirpath=tmp_path, monitor="val_loss", save_top_k=2)
    stop = callbacks.EarlyStopping(monitor="val_loss", patience=1, min_delta=1e9)
    module = make_module(pl)
    trainer = make_trainer(
        pl, mode, max_epochs=9, callbacks=[best, stop], enable_checkpointing=True
    )
    trainer.fit(module, batches(4), batches(4, seed=1))
    assert trainer.current_epoch == 2
    assert stop.best_score.dtype == torch.float32
    scores = [score.item() for score in best.best_k_models.values()]
    assert len(set(scores)) == 2
    # More digits than bf16 has.
    assert any(torch.tensor(score).bfloat16().item() != score for score in scores)
    restored = torch.load(best.best_model_path, weights_only=True)
    assert {v.dtype for v in restored["state_dict"].values()} == {torch.bfloat16}


def test_a_compiled_module_trains_to_the_bits_of_the_plain_one(pl, mode):
    plain, compiled = make_module(pl), make_module(pl)
    compiled.net = torch.compile(compiled.net, backend="eager")
    for module in (plain, compiled):
        make_trainer(pl, mode).fit(module, batches(6))
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_compiled_lightning_module_trains(pl, mode):
    module = make_module(pl)
    compiled = torch.compile(module, backend="eager")
    make_trainer(pl, mode).fit(compiled, batches(4))
    assert isinstance(module.made[0], torch_bf16.AdamW)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


def test_load_from_checkpoint_gives_an_fp32_module_with_the_bf16_values(pl, mode, tmp_path):
    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Net()
    trainer = make_trainer(pl, mode)
    trainer.fit(module, batches(4))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    options = {}
    if "weights_only" in inspect.signature(Net.load_from_checkpoint).parameters:
        options["weights_only"] = True
    loaded = Net.load_from_checkpoint(tmp_path / "last.ckpt", **options)
    for one, other in zip(loaded.parameters(), module.parameters(), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other.float(), rtol=0, atol=0)


@pytest.mark.parametrize("other", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("ours_first", [True, False], ids=["from-ours", "to-ours"])
def test_checkpoints_are_exchanged_with_every_other_precision(
    pl, mode, other, ours_first, tmp_path, caplog
):
    first, second = (mode, other) if ours_first else (other, mode)
    start = make_module(pl)
    trainer = make_trainer(pl, first)
    trainer.fit(start, batches(4))
    trainer.save_checkpoint(tmp_path / "mid.ckpt")
    module = make_module(pl, seed=1)
    trainer = make_trainer(pl, second, max_epochs=2)
    trainer.fit(module, batches(4), ckpt_path=tmp_path / "mid.ckpt")
    assert trainer.global_step == 8
    moments = [state["exp_avg_sq"] for state in module.made[0].state.values()]
    assert all(torch.isfinite(each.float()).all() for each in moments)
    assert all(state["step"].item() == 8 for state in module.made[0].state.values())
    assert all(torch.isfinite(p).all() for p in module.parameters())
    if ours_first:
        trainer.save_checkpoint(tmp_path / "other.ckpt")
        back = make_module(pl, seed=2)
        trainer = make_trainer(pl, mode, max_epochs=3)
        with caplog.at_level("WARNING", "torch_bf16"):
            trainer.fit(back, batches(4), ckpt_path=tmp_path / "other.ckpt")
        assert trainer.global_step == 12
        rest = sum(p.numel() for p in back.parameters() if mode == MASTER or p.ndim < 2)
        rounded = f"weights bf16+16 -> bf16_nearest: {rest:,} of {rest:,} numbers rounded"
        # From fp32 weights masters start as they are.
        assert (rounded in caplog.text) == (other == "bf16-true")


def test_toggled_optimizers_with_closures_train_only_their_own_parameters(pl, mode):
    def configure_optimizers(self):
        halves = list(self.net)[:2], list(self.net)[2:]
        return [torch.optim.SGD(torch.nn.Sequential(*half).parameters(), lr=0.1) for half in halves]

    def training_step(self, batch, batch_idx):
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            before = [p.detach().clone() for p in self.parameters()]

            def closure(optimizer=optimizer):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)
            self.untoggle_optimizer(optimizer)
            moved = [
                not torch.equal(one, other)
                for one, other in zip(before, self.parameters(), strict=True)
            ]
            # Linear and LayerNorm in the first half, one more Linear in the second.
            assert any(moved[4:] if number else moved[:4])
            assert not any(moved[:4] if number else moved[4:])

    module = make_module(pl, configure_optimizers=configure_optimizers, training_step=training_step)
    module.automatic_optimization = False
    trainer = make_trainer(pl, mode)
    trainer.fit(module, batches(3))
    assert trainer.global_step == 6


def test_an_optimizer_without_a_fused_rule_trains_by_its_own_step(pl, mode):
    def configure_optimizers(self):
        self.made = [torch.optim.Rprop(self.parameters(), lr=1e-3)]
        return self.made[0]

    module = make_module(pl, configure_optimizers=configure_optimizers)
    make_trainer(pl, mode).fit(module, batches(4))
    assert isinstance(module.made[0], torch_bf16.BF16Optimizer)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert {int(state["step"]) for state in module.made[0].state.values()} == {4}


def test_summary_and_progress_bar_are_those_of_bf16_true(pl, mode, capsys):
    seen = []
    callbacks = callbacks_of(pl)
    for precision in (mode, "bf16-true"):
        module = make_module(pl)
        trainer = make_trainer(
            pl,
            precision,
            enable_model_summary=True,
            enable_progress_bar=True,
            callbacks=[callbacks.TQDMProgressBar()],
        )
        trainer.fit(module, batches(2))
        shown, _ = capsys.readouterr()
        # The bar's rates differ from run to run; its text does not.
        bar = [line.split("|")[0] for line in shown.replace("\r", "\n").splitlines()]
        kinds = [type(callback) for callback in trainer.callbacks]
        assert any(issubclass(kind, callbacks.ModelSummary) for kind in kinds)
        summary = importlib.import_module(f"{pl.__name__}.utilities.model_summary")
        total = summary.summarize(module)
        assert total.total_parameters == sum(p.numel() for p in module.parameters())
        seen.append((kinds, str(total), total.model_size, bar))
    assert seen[0] == seen[1]
    assert "Epoch 0: 100%" in seen[0][3]
