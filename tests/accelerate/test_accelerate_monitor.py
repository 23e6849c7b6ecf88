"""What rounding does to the updates, in the trackers that a script logs to anyway."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from accelerate.tracking import GeneralTracker


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
        accelerator.log({"loss": loss}, step=step)
    assert [step for step, values in notes.logged if len(values) > 1] == [3, 7]
    _, values = notes.logged[3]
    assert {"loss", "bf16/survived/up", "bf16/unmoved/up", "bf16/gradient_norm"} <= values.keys()
    assert values["bf16/skipped_steps"] == 0
    expected = 1.0 if mode == "bf16-fp32-master" else pytest.approx(1.0, abs=0.2)
    assert values["bf16/survived/up"] == expected


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
        accelerator.init_trackers("run")


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
