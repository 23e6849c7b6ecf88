"""Callbacks that write or average weights."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from lightning_models import (
    batches,
    callback_of,
    callbacks_of,
    differences,
    make_module,
    make_trainer,
    snapshot,
    tuner_of,
)
from torch.optim.swa_utils import get_ema_avg_fn, get_ema_multi_avg_fn

WAYS = {
    "the mean": {},
    "its own function": {"avg_fn": get_ema_avg_fn(0.5)},
    "its own lerp": {"avg_fn": lambda average, current, _: average.lerp(current, 0.5)},
    "many at once": {"multi_avg_fn": get_ema_multi_avg_fn(0.5)},
    "buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.5), "use_buffers": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_subclass_of_weight_averaging_averages_in_fp32_in_its_own_way(pl, mode, way):
    class Own(callback_of(pl, "WeightAveraging")):
        def should_update(self, step_idx=None, epoch_idx=None):
            return step_idx is not None

    class Follow(callbacks_of(pl).Callback):
        seen = ()

        def on_train_batch_end(self, trainer, pl_module, *_):
            self.seen = [*self.seen, [p.detach().float() for p in pl_module.parameters()]]

    average, follow = Own(**{"use_buffers": False, **WAYS[way]}), Follow()
    trainer = make_trainer(pl, mode, callbacks=[follow, average])
    trainer.fit(make_module(pl), batches(4), batches(1))
    first, *others = [torch.cat([each.flatten() for each in seen]) for seen in follow.seen]
    expected = first.double()
    for number, each in enumerate(others, 1):
        expected.lerp_(each.double(), 0.5 if WAYS[way] else 1 / (number + 1))
    found = [p.detach() for p in average._average_model.module.parameters()]
    assert {p.dtype for p in found} == {torch.float32}
    found = torch.cat([each.flatten() for each in found])
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-8)


BEFORE = {
    "validate": lambda pl, trainer, module: trainer.validate(module, batches(1), verbose=False),
    "fit": lambda pl, trainer, module: trainer.fit(module, batches(2)),
    "lr_find": lambda pl, trainer, module: tuner_of(pl, trainer).lr_find(
        module, batches(20), num_training=2, update_attr=False
    ),
    "bfloat16": lambda pl, trainer, module: module.bfloat16(),
}


@pytest.mark.filterwarnings("ignore:.*Not enough points")  # a finder of two batches
@pytest.mark.parametrize("before", BEFORE)
def test_averages_of_a_module_that_was_bf16_before_its_fit_are_fp32(pl, mode, before, tmp_path):
    callbacks, module = callbacks_of(pl), make_module(pl)
    module.lr = 1e-3
    BEFORE[before](pl, make_trainer(pl, mode, default_root_dir=tmp_path), module)
    assert module.net[0].weight.dtype == torch.bfloat16
    averages = [callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)]
    if hasattr(callbacks, "EMAWeightAveraging"):
        averages.append(callbacks.EMAWeightAveraging(decay=0.99))
    trainer = make_trainer(pl, mode, max_epochs=4, callbacks=averages)
    trainer.fit(module, batches(4), batches(1))
    for each in averages:
        found = [p.detach() for p in each._average_model.parameters()]
        assert {p.dtype for p in found} == {torch.float32}
        assert any((p != p.bfloat16()).any() for p in found)


def averages_of(pl, kind):
    """A callback of this kind and the average that it has."""
    callbacks = callbacks_of(pl)
    if kind == "SWA":
        swa = callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
        return swa, lambda: swa._average_model
    averaging = callback_of(pl, "EMAWeightAveraging")
    ema = averaging(decay=0.9)
    return ema, lambda: ema._average_model.module


@pytest.mark.parametrize("before", ["validate", "fit"])
@pytest.mark.parametrize("kind", ["EMA", "SWA"])
def test_a_resume_loads_all_bits_of_an_average_whatever_the_module_was(
    pl, mode, kind, before, tmp_path
):
    class Look(callbacks_of(pl).Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            self.start = {k: v.detach().clone() for k, v in self.average().state_dict().items()}
            if trainer.current_epoch == 3:
                trainer.save_checkpoint(tmp_path / "c.ckpt")
                self.saved = self.start

    def fit(module, **options):
        look = Look()
        callback, look.average = averages_of(pl, kind)
        # First, so that it sees the average before SWA moves it at the start of the epoch.
        trainer = make_trainer(pl, mode, max_epochs=4, callbacks=[look, callback])
        trainer.fit(module, batches(4), **options)
        return look

    saved = fit(make_module(pl)).saved
    assert any((v != v.bfloat16()).any() for v in saved.values())
    module = make_module(pl, seed=9)
    BEFORE[before](pl, make_trainer(pl, mode), module)
    assert module.net[0].weight.dtype == torch.bfloat16
    resumed = fit(module, ckpt_path=tmp_path / "c.ckpt")
    assert differences(saved, resumed.start) == []


# True, and said by the second fit: the first has left the average in the module.
@pytest.mark.filterwarnings("ignore:.*bf16 weights, .* were written through p.data")
def test_a_fit_after_one_that_failed_in_validation_trains_its_own_weights(pl, mode):
    callbacks = callbacks_of(pl)
    averaging = callback_of(pl, "EMAWeightAveraging")

    class Follow(callbacks.Callback):
        fails = True

        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch:
                assert torch.equal(pl_module.net[0].weight, self.trained)

        def on_train_batch_end(self, trainer, pl_module, *_):
            self.trained = pl_module.net[0].weight.detach().clone()

        def on_validation_batch_end(self, trainer, pl_module, *_):
            assert not torch.equal(pl_module.net[0].weight, self.trained)
            if self.fails:
                raise RuntimeError("in a validation")

    average, follow, module = averaging(decay=0.9), Follow(), make_module(pl)
    with pytest.raises(RuntimeError, match="in a validation"):
        make_trainer(pl, mode, callbacks=[follow, average]).fit(module, batches(4), batches(1))
    follow.fails = False
    module.train()
    trainer = make_trainer(pl, mode, max_epochs=3, callbacks=[follow, average])
    trainer.fit(module, batches(4), batches(1))


def test_a_buffer_that_a_hook_registers_is_no_part_of_an_average_as_in_32_true(pl, mode):
    averaging = callback_of(pl, "EMAWeightAveraging")
    found = []

    def on_fit_start(self):
        self.register_buffer("noted", torch.full((1,), 3.0))
        self.net.register_buffer("first", torch.full((1,), 3.0))

    def on_validation_batch_end(self, *_):
        copies = average._average_model.module.state_dict()
        lent = self.state_dict()
        added = [lent.pop(name) for name in ("noted", "net.first")]
        own = {name: value.to(lent[name].dtype) for name, value in copies.items()}
        found.append(added == [3, 3] and differences(own, lent) == [])

    for precision in ("32-true", mode):
        average = averaging(decay=0.9)
        hooks: dict[str, Any] = {"on_fit_start": on_fit_start}
        if precision == mode:
            hooks["on_validation_batch_end"] = on_validation_batch_end
        module = make_module(pl, **hooks)
        make_trainer(pl, precision, callbacks=[average]).fit(module, batches(4), batches(2))
    assert found == [True, True]


def test_a_checkpoint_of_a_validation_with_an_average_is_that_of_the_step_before(
    pl, mode, tmp_path
):
    callbacks = callbacks_of(pl)
    averaging = callback_of(pl, "EMAWeightAveraging")

    class Save(callbacks.Callback):
        def on_validation_start(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "before.ckpt")
                self.trained = pl_module.net[0].weight.detach().clone()

        def on_validation_batch_end(self, trainer, pl_module, *_):
            if trainer.current_epoch == 0:
                average = pl_module.net[0].weight.detach().clone()
                trainer.save_checkpoint(tmp_path / "within.ckpt")
                assert torch.equal(pl_module.net[0].weight, average)
                assert not torch.equal(average, self.trained)

    def fit(*more, seed=0, **options):
        module = make_module(pl, seed=seed)
        average = averaging(decay=0.5)
        trainer = make_trainer(pl, mode, max_epochs=2, callbacks=[*more, average])
        trainer.fit(module, batches(4), batches(1), **options)
        found = snapshot(module, module.made[0])
        return found | {f"average {k}": v for k, v in average._average_model.state_dict().items()}

    def tensors(part):
        found = torch.utils._pytree.tree_leaves(part)
        return {str(n): v for n, v in enumerate(found) if isinstance(v, torch.Tensor)}

    whole = fit()
    assert differences(whole, fit(Save())) == []
    before, within = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("before", "within")
    )
    for part in ("state_dict", "current_model_state", "averaging_state", "optimizer_states"):
        assert differences(tensors(before[part]), tensors(within[part])) == []
    assert differences(whole, fit(seed=9, ckpt_path=tmp_path / "within.ckpt")) == []


def prune(pl, precision, lottery, permanent):
    """The module and its Trainer, and in which epochs weights were the first ones."""
    first, seen = [], []

    def on_train_epoch_start(self):
        layer = self.net[0]
        weight = getattr(layer, "weight_orig", layer.weight).detach()
        if not first:
            first.append(weight.clone())
        seen.append(torch.equal(weight, first[0]))

    callback = callbacks_of(pl).ModelPruning(
        "l1_unstructured",
        amount=0.25,
        use_lottery_ticket_hypothesis=lottery,
        make_pruning_permanent=permanent,
    )
    module = make_module(pl, on_train_epoch_start=on_train_epoch_start)
    trainer = make_trainer(pl, precision, max_epochs=3, callbacks=[callback])
    trainer.fit(module, batches(4))
    return module, trainer, seen


@pytest.mark.filterwarnings("ignore:.*bf16 weights, .* were written through p.data")
@pytest.mark.parametrize("lottery", [True, False])
@pytest.mark.parametrize("permanent", [True, False])
def test_pruning_goes_back_to_the_first_weights_as_in_32_true_and_trains_on(
    mode, lottery, permanent, tmp_path
):
    pl = importlib.import_module("lightning.pytorch")
    module, trainer, seen = prune(pl, mode, lottery, permanent)
    other, _, expected = prune(pl, "32-true", lottery, permanent)
    assert seen == expected
    for mine, theirs in zip(
        (module.net[0], module.net[3]), (other.net[0], other.net[3]), strict=True
    ):
        assert {p.dtype for p in mine.parameters()} == {torch.bfloat16}
        assert hasattr(mine, "weight_orig") is not permanent
        assert abs(int((mine.weight == 0).sum()) - int((theirs.weight == 0).sum())) < 4
    trainer.save_checkpoint(tmp_path / "pruned.ckpt")
    saved = torch.load(tmp_path / "pruned.ckpt", weights_only=True)["state_dict"]
    name = "net.0.weight" if permanent else "net.0.weight_orig"
    assert saved[name].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8])
def test_frozen_parameters_of_other_dtypes_are_left_alone(pl, mode, dtype):
    module = make_module(pl)
    module.teacher = torch.nn.Parameter(torch.ones(8).to(dtype), requires_grad=False)
    module.base = torch.nn.Linear(8, 8).requires_grad_(False)
    trainer = make_trainer(pl, mode)
    trainer.fit(module, batches(3))
    assert (module.teacher.dtype, module.base.weight.dtype) == (dtype, torch.bfloat16)
    assert module.teacher.sum() == 8
    assert module.made[0].state[module.net[0].weight]
    trainer.validate(module, batches(1), verbose=False)
