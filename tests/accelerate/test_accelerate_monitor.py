"""What rounding does to the updates, in the trackers that a script logs to anyway."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import transformers
from accelerate.tracking import GeneralTracker
from tiny_llm import llama, sequences
from transformers import Trainer, TrainerCallback, TrainingArguments

import torch_bf16
from accelerate_bf16 import BF16RecipeKwargs

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


class Notes(GeneralTracker):
    """A tracker that keeps what it is told."""

    name = "notes"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.logged = []

    @property
    def tracker(self):
        return self.logged

    def store_init_configuration(self, values):
        self.configuration = values

    def log(self, values, step=None, **kwargs):
        self.logged.append((step, values))


@pytest.fixture
def notes():
    return Notes()


@pytest.mark.parametrize("trackers_first", [True, False])
def test_metrics_of_each_look_are_logged_once_with_the_scripts_own(
    make_accelerator, train, mode, model, batches, notes, monkeypatch, trackers_first
):
    monkeypatch.setenv("BF16_MONITOR", "4")
    accelerator = make_accelerator(mode, log_with=notes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if trackers_first:
        accelerator.init_trackers("run")
        prepared, wrapped = accelerator.prepare(model, optimizer)
    else:
        prepared, wrapped = accelerator.prepare(model, optimizer)
        accelerator.init_trackers("run")
    for step in range(9):
        (loss,) = train(accelerator, prepared, wrapped, batches[step : step + 1])
        accelerator.log({"loss": loss}, step)
    assert [step for step, values in notes.logged if len(values) > 1] == [3, 7]
    _, values = notes.logged[3]
    assert {"loss", "bf16/survived/up", "bf16/unmoved/up", "bf16/gradient_norm"} <= values.keys()
    assert values["bf16/skipped_steps"] == 0
    expected = 1.0 if mode == "bf16-fp32-master" else pytest.approx(1.0, abs=0.2)
    assert values["bf16/survived/up"] == expected


def test_a_monitor_that_was_asked_for_and_cannot_be_is_said_once(
    make_accelerator, model, notes, monkeypatch, caplog
):
    released = [BF16RecipeKwargs(release_gradients=True)]
    accelerator = make_accelerator("bf16-stochastic", log_with=notes, kwargs_handlers=released)
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    assert "BF16_MONITOR" not in caplog.text
    monkeypatch.setenv("BF16_MONITOR", "5")
    for _ in range(2):
        accelerator.prepare(*accelerator._models, *accelerator._optimizers)
    assert caplog.text.count("BF16_MONITOR=5 logs no figures of SGD: the optimizer's steps") == 1


def test_each_of_two_optimizers_has_its_number(
    make_accelerator, train, mode, model, batches, notes, monkeypatch
):
    monkeypatch.setenv("BF16_MONITOR", "1")
    accelerator = make_accelerator(mode, log_with=notes)
    accelerator.init_trackers("run")
    up, *others = model.parameters()
    optimizers = [torch.optim.AdamW([up]), torch.optim.AdamW(others)]
    prepared, *wrapped = accelerator.prepare(model, *optimizers)
    train(accelerator, prepared, wrapped[0], batches[:1])
    wrapped[1].step()
    accelerator.log({}, step=0)
    (_, values) = notes.logged[0]
    assert {name.rpartition("/")[0] for name in values if name.endswith("gradient_norm")} == {
        "bf16/optimizer_0",
        "bf16/optimizer_1",
    }
    # Which is what the Trainer's console is spared.
    assert all(name.startswith("bf16/optimizer_") for name in values)


def test_an_optimizer_has_one_monitor_however_often_prepare_is_called(
    make_accelerator, train, mode, model, batches, notes, monkeypatch
):
    monkeypatch.setenv("BF16_MONITOR", "1")
    accelerator = make_accelerator(mode, log_with=notes)
    accelerator.init_trackers("run")
    prepared, wrapped = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    own = torch_bf16.UpdateMonitor(wrapped.optimizer, every=1)
    accelerator.prepare(torch.nn.Linear(1, 1))
    train(accelerator, prepared, wrapped, batches[:1])
    accelerator.log({}, step=0)
    (_, values) = notes.logged[0]
    assert "bf16/gradient_norm" in values  # of the only one, which needs no number
    assert torch_bf16.take_figures([own]).keys() == values.keys()


def test_without_trackers_or_with_zero_nobody_watches(
    make_accelerator, model, notes, monkeypatch, mode
):
    optimizer = torch.optim.AdamW(model.parameters())
    make_accelerator(mode).prepare(model, optimizer)
    assert optimizer.observers == []
    monkeypatch.setenv("BF16_MONITOR", "0")
    accelerator = make_accelerator(mode, log_with=notes)
    accelerator.init_trackers("run")
    accelerator.prepare(optimizer)
    assert optimizer.observers == []
    monkeypatch.setenv("BF16_MONITOR", "often")
    with pytest.raises(ValueError, match="BF16_MONITOR='often' must be the number of steps"):
        accelerator.prepare(optimizer)


def test_accelerates_own_modes_log_what_the_script_logs(make_accelerator, model, notes):
    accelerator = make_accelerator("no", log_with=notes)
    accelerator.init_trackers("run")
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.log({"loss": 1.0}, step=0)
    assert notes.logged == [(0, {"loss": 1.0})]


def test_free_memory_frees_what_was_watched(make_accelerator, mode, model, notes):
    accelerator = make_accelerator(mode, log_with=notes)
    accelerator.init_trackers("run")
    prepared, wrapped = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    alive = weakref.ref(wrapped.optimizer)
    prepared, wrapped = accelerator.free_memory(prepared, wrapped)
    gc.collect()
    assert alive() is None


def in_quiet(folder, **options):
    """Arguments of a Trainer on the CPU that reports to no service."""
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )


@pytest.mark.parametrize("used", ["no", "bf16-fp32-master"])
def test_figures_that_a_program_names_alike_stay_in_its_logs(tmp_path, monkeypatch, used):
    class Overflows(TrainerCallback):
        """Stands for a reporter that adds a figure of the program's own."""

        def on_log(self, args, state, control, logs=None, **kwargs):
            logs["bf16/overflows"] = 0

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", used)
    console = Told()
    monkeypatch.setenv("BF16_MONITOR", "1")
    first, last = transformers.trainer.get_reporting_integration_callbacks([])
    monkeypatch.setattr(
        transformers.trainer,
        "get_reporting_integration_callbacks",
        lambda _: [first, Overflows, last],
    )
    arguments = in_quiet(tmp_path, max_steps=2, logging_steps=1)
    Trainer(llama(), arguments, train_dataset=sequences(), callbacks=[console]).train()
    assert [each for logs in console.logs for each in logs if each.startswith("bf16/")] == [
        "bf16/overflows"
    ] * len(console.logs)


class Told(TrainerCallback):
    """Stands for what reports to a service, and for the console after it."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def test_the_trainer_reports_the_figures_and_spares_the_console(tmp_path, monkeypatch, mode):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", mode)
    monkeypatch.setenv("BF16_MONITOR", "3")
    service, console = Told(), Told()
    around = transformers.trainer.get_reporting_integration_callbacks([])
    between = [around[0], service, around[1]]
    monkeypatch.setattr(
        transformers.trainer, "get_reporting_integration_callbacks", lambda _: between
    )
    arguments = in_quiet(
        tmp_path, max_steps=6, logging_steps=2, eval_strategy="steps", eval_steps=3
    )
    data = sequences()
    trainer = Trainer(
        llama(), arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[console]
    )
    trainer.train()
    figures = [{k for k in logs if k.startswith("bf16/")} for logs in service.logs]
    told = [bool(each) for each in figures]
    training = ["loss" in logs for logs in service.logs]
    assert training == [True, False, True, True, False, False]
    assert told == [False, False, True, True, False, False]
    assert "bf16/survived/lm_head" in figures[2]
    spared = [{k: v for k, v in each.items() if not k.startswith("bf16/")} for each in service.logs]
    assert console.logs == spared
    kept = [name for each in trainer.state.log_history for name in each if "survived" in name]
    assert len(kept) == 2 * sum("survived" in name for name in figures[2])


def test_without_reports_the_trainer_watches_nothing(tmp_path, monkeypatch, mode):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", mode)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    trainer = Trainer(llama(), arguments, train_dataset=sequences())
    trainer.train()
    assert trainer.optimizer.optimizer.observers == []
    # Those that transformers' own test lists.
    names = [type(each).__name__ for each in trainer.callback_handler.callbacks]
    assert names == ["DefaultFlowCallback", "PrinterCallback"]
