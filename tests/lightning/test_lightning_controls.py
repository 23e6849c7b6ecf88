"""What goes wrong in Lightning's own bf16-true does not here; each test runs both, as its control.

``right`` says which of the two a test is looking at: it asserts as well that the control does go
wrong, so that no test can hold for want of a case. Averages of weights have theirs in
test_lightning_tools.py, updates below half an ulp in test_lightning_numerics.py.
"""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning_models import MODES, batches, host, loader, make_module, make_trainer
from torch import nn
from torchmetrics import MeanMetric

import lightning_bf16

CONTROL = "bf16-true"
PL = host("lightning.pytorch")


@pytest.fixture(params=[*MODES, CONTROL])
def precision(request):
    return request.param


@pytest.fixture
def right(precision):
    return precision != CONTROL


def fitted(precision, data=None, *, plugins=None, parts=None, trainer=None, **hooks):
    """A module after its fit; ``parts`` are its submodules, ``hooks`` its methods."""
    module = make_module(PL, **hooks)
    for name, part in (parts or {}).items():
        setattr(module, name, part)
    chosen = {"plugins": plugins} if plugins else {"precision": precision}
    made = make_trainer(PL, **chosen, **(trainer or {}))
    made.fit(module, batches(1) if data is None else data)
    return module


def is_bf16(values):
    return torch.equal(values, values.bfloat16().to(values.dtype))


@pytest.mark.parametrize("late", [False, True], ids=["in-init", "in-configure-model"])
def test_a_metric_counts_beyond_256(precision, right, late):
    def configure_model(self):
        if late:
            self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        for _ in range(1000):
            self.mean.update(1.0)
        return self(batch[0]).sum()

    parts = {} if late else {"mean": MeanMetric()}
    hooks = {"configure_model": configure_model, "training_step": training_step}
    module = fitted(precision, parts=parts, **hooks)
    assert module.mean.weight.item() == (1000 if right else 256)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        exponents = torch.arange(0, 64, 2) / 64
        self.register_buffer("inv_freq", 10000.0**-exponents)
        self.register_buffer("freqs_cis", torch.polar(torch.ones(32), 10000.0**-exponents))

    def phases(self, position):
        return position * self.inv_freq.double()


@pytest.mark.filterwarnings("ignore:Casting complex values to real discards the imaginary part")
def test_rotary_phases_at_position_4096_are_exact(precision, right):
    rotary, exact = Rotary(), Rotary()
    fitted(precision, parts={"rotary": rotary})
    error = (rotary.phases(4096) - exact.phases(4096)).abs().max().item()
    assert error == 0 if right else error > 1  # radians
    assert rotary.freqs_cis.is_complex() == right
    assert torch.equal(rotary.freqs_cis, exact.freqs_cis) == right


def test_what_a_step_makes_is_fp32(precision, right):
    seen = []

    def training_step(self, batch, batch_idx):
        positions = torch.arange(0.0, 4096.0)
        seen.append((len(positions.unique()), torch.tensor(0.1).item(), torch.zeros(1).dtype))
        return self(batch[0]).sum()

    fitted(precision, training_step=training_step)
    distinct, tenth, dtype = seen[0]
    assert (distinct == 4096) == right
    assert (tenth == torch.tensor(0.1, dtype=torch.float32).item()) == right
    assert (dtype == torch.float32) == right


def test_other_threads_go_on_making_fp32_tensors_during_a_step(precision, right):
    made = []

    def training_step(self, batch, batch_idx):
        thread = threading.Thread(target=lambda: made.append(torch.zeros(1).dtype))
        thread.start()
        thread.join()
        return self(batch[0]).sum()

    fitted(precision, training_step=training_step)
    assert (made == [torch.float32]) == right


def test_inputs_targets_and_times_arrive_as_they_are(precision, right):
    seen = []

    def training_step(self, batch, batch_idx):
        seen.append(batch)
        return self.net(batch["x"]).sum()

    batch = {
        "x": torch.full((1, 8), 1000.3),
        "target": torch.tensor([257.0]),
        "time": torch.tensor([1.7e9 + 0.25], dtype=torch.float64),
    }
    fitted(precision, loader([batch]), training_step=training_step)
    for name, given in batch.items():
        assert torch.equal(seen[0][name].double(), given.double()) == right, name


def test_losses_and_what_is_logged_have_the_digits_of_fp32(precision, right):
    losses, logged = [], []

    def training_step(self, batch, batch_idx):
        loss = (self(batch[0]) - 0.3).square().mean()
        losses.append(loss.detach())
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        logged.append(self.trainer.callback_metrics["loss"])

    hooks = {"training_step": training_step, "on_train_batch_end": on_train_batch_end}
    fitted(precision, batches(8), **hooks)
    # The control's were rounded before they were logged in fp32.
    assert {loss.dtype for loss in losses} == {torch.float32 if right else torch.bfloat16}
    assert {value.dtype for value in logged} == {torch.float32}
    assert is_bf16(torch.stack(logged)) != right


def test_losses_that_fall_by_a_ten_thousandth_are_no_ties_to_early_stopping(precision, right):
    stop = EarlyStopping("val_loss", patience=1)

    def validation_step(self, batch, batch_idx):
        loss = self(batch[0]).mean() * 0 + 1
        self.log("val_loss", loss - 1e-4 * self.current_epoch)

    module = make_module(PL, validation_step=validation_step)
    trainer = make_trainer(PL, precision, max_epochs=5, callbacks=[stop])
    trainer.fit(module, batches(1), batches(1))
    assert trainer.current_epoch == (5 if right else 2)
    assert stop.best_score.item() == pytest.approx(0.9996 if right else 1.0, abs=1e-7)


def test_predictions_can_become_arrays(precision, right):
    predictions = make_trainer(PL, precision).predict(make_module(PL), batches(1))
    if right:
        assert predictions[0].numpy().dtype == "float32"
    else:
        with pytest.raises(TypeError, match="unsupported ScalarType BFloat16"):
            predictions[0].numpy()


def test_an_evaluation_that_rounds_the_users_weights_says_so(precision, right, caplog):
    module = make_module(PL)
    with caplog.at_level(logging.INFO):
        make_trainer(PL, precision).validate(module, batches(1), verbose=False)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert ("casts the parameters of your module to bf16" in caplog.text) == right


def test_clipping_ends_at_the_norm_that_was_asked_for(precision, right):
    norms = []

    def training_step(self, batch, batch_idx):
        return (self.weight * torch.linspace(0.5, 2, 50_000)).sum()

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        norm = self.weight.grad.double().norm().item()
        norms.append(norm * (float(optimizer._engine.pending.coefficient) if right else 1))

    def configure_optimizers(self):
        return torch.optim.SGD([self.weight], lr=1.0)

    fitted(
        precision,
        parts={"weight": nn.Parameter(torch.zeros(50_000))},
        trainer={"gradient_clip_val": 1.0},
        training_step=training_step,
        configure_gradient_clipping=configure_gradient_clipping,
        configure_optimizers=configure_optimizers,
    )
    error = abs(norms[0] - 1)
    # That of an fp32 sum of 50,000 squares, and that of a bf16 norm and of scaled bf16 gradients.
    assert error < 3e-5 if right else error > 5e-4


def test_a_thousand_small_gradients_add_up(precision, right):
    sums = []

    def training_step(self, batch, batch_idx):
        return self.weight.sum() * 0.001 * 1000  # which the Trainer divides by 1000

    def on_before_optimizer_step(self, optimizer):
        sums.append(self.weight.grad.double().mean().item())

    def configure_optimizers(self):
        return torch.optim.SGD([self.weight], lr=1.0)

    plugin = lightning_bf16.BF16Precision(precision, accumulate="bf16_stochastic") if right else ()
    fitted(
        precision,
        batches(1, repeat=1000),
        plugins=plugin and [plugin],
        parts={"weight": nn.Parameter(torch.zeros(64, 64))},
        trainer={"accumulate_grad_batches": 1000},
        training_step=training_step,
        on_before_optimizer_step=on_before_optimizer_step,
        configure_optimizers=configure_optimizers,
    )
    # 4096 sums of 1000 roundings, each by at most half of 2^-8: six standard deviations.
    assert abs(sums[0] - 1) < 6 * 1000**0.5 * 2**-9 / 64 + 0.002 if right else sums[0] == 0.5


def test_adamw_moves_weights_and_both_moments_as_in_fp32(precision, right):
    """500 steps of 1e-3 from 1.0 under a gradient of 1."""

    def training_step(self, batch, batch_idx):
        return self.weight.float().sum()

    def configure_optimizers(self):
        self.made = [torch.optim.AdamW([self.weight], lr=1e-3, weight_decay=0.0)]
        return self.made[0]

    module = fitted(
        precision,
        batches(1, repeat=500),
        parts={"weight": nn.Parameter(torch.ones(32, 32))},
        training_step=training_step,
        configure_optimizers=configure_optimizers,
    )
    weight = module.weight.detach().double().mean().item()
    moment = module.made[0].state[module.weight]["exp_avg_sq"].double().mean().item()
    exact = 1 - 0.999**500
    if right:
        # One weight wanders by sqrt(500 * 1e-3 * ulp) = 0.04, their mean by 0.0014.
        assert abs(weight - 0.5) < 0.009
        assert abs(moment - exact) < 0.01
    else:
        assert weight == 1
        assert abs(moment - exact) > 0.1


def test_running_statistics_of_batch_norm_reach_the_mean(precision, right):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for _ in range(3000):
                self.norm(torch.tensor([[0.5], [1.5]]))
        return self(batch[0]).sum()

    module = fitted(precision, parts={"norm": nn.BatchNorm1d(1)}, training_step=training_step)
    mean = module.norm.running_mean.item()
    assert abs(mean - 1) < 1e-5 if right else abs(mean - 1) > 0.01


def test_weights_that_are_made_in_configure_model_are_drawn_in_fp32(precision, right):
    drawn = []

    def configure_model(self):
        torch.manual_seed(0)
        self.late = nn.Linear(8, 8)
        drawn.append(self.late.weight.detach().clone())

    fitted(precision, configure_model=configure_model)
    assert (drawn[0].dtype == torch.float32) == right
    torch.manual_seed(0)
    assert torch.equal(drawn[0].float(), nn.Linear(8, 8).weight) == right


@pytest.mark.parametrize("mode", MODES)
def test_a_later_run_in_another_precision_is_told_how_to_have_fp32_weights(mode):
    module = make_module(PL)
    make_trainer(PL, mode).fit(module, batches(1))
    with pytest.warns(UserWarning, match=r"in another precision, call model\.float\(\)"):
        make_trainer(PL, "32-true").fit(module, batches(1))
