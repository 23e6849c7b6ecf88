"""Trainings on a CUDA device that is made of host memory: nothing in a step waits for a GPU, and
checkpoints carry runs from one device to another."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_bf16
from torch_bf16.backends.host_copy import HostCopy

# A training that waits by itself, in every way.
CONTROL = "waits of the program's own"
READS_INPUTS = {"backends/inputs.py on_host: aten::_local_scalar_dense"}
# What a GPU waits for in each step after the second one; in the other trainings nothing does.
WAITING = {
    # Directions need the factor of the gradients as a number.
    "Muon, clipped": READS_INPUTS,
    "Adafactor, clipped": READS_INPUTS,
    # Groups count the steps that were not skipped.
    "AdamWScheduleFree, clipped": {"backends/inputs.py is_skipped: aten::_local_scalar_dense"},
    "SGDScheduleFree, clipped": {"backends/inputs.py is_skipped: aten::_local_scalar_dense"},
}
# What a GPU waits for in one step of many.
ONCE = {
    "windows in which blends are looked for": {
        "model/loose_averages.py _closest: a copy to the host"
    }
}


@pytest.fixture(scope="module")
def found_there(hollow_library, tmp_path_factory):
    """What the process of ``hollow_training.py`` has found."""
    folder = tmp_path_factory.mktemp("hollow")
    script = Path(__file__).parents[1] / "support" / "hollow_training.py"
    command = [sys.executable, str(script), str(hollow_library), str(folder / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


@pytest.fixture
def trainings(found_there):
    """What waited in each training, with the steps."""
    return found_there["waits"]


def test_the_device_shows_what_waits(trainings):
    found = trainings[CONTROL]
    assert {each.partition(": ")[2] for each in found} == {
        "aten::_local_scalar_dense",
        "aten::equal",
        "aten::nonzero",
        "a copy to the host",
        "a copy to the host's pageable memory",
        "a copy from the host",
    }


def test_only_known_trainings_wait_for_the_device(trainings):
    often, once = {}, {}
    for name, found in trainings.items():
        if name == CONTROL:
            continue
        for what, steps in found.items():
            (once if len({*steps}) == 1 else often).setdefault(name, set()).add(what)
    assert often == WAITING
    assert once == ONCE


@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])
def test_checkpoints_carry_a_run_between_devices_bit_for_bit(found_there, recipe):
    on_the_cpu, *carried = found_there["carried"][recipe].values()
    assert len(on_the_cpu) > 8
    assert carried == [on_the_cpu, on_the_cpu]


def test_what_a_gpu_is_still_counting_is_warned_of_at_a_later_step(monkeypatch):
    parameter = torch.nn.Parameter(torch.randn(64, 33).bfloat16())
    optimizer = torch_bf16.AdamW([parameter], lr=1e-3, recipe="bf16-fp32-master")

    def step():
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    step()
    with monkeypatch.context() as patch:
        patch.setattr(HostCopy, "is_there", False)
        patch.setattr(HostCopy, "read", lambda _: pytest.fail("the host would wait"))
        parameter.data.mul_(2)
        step()
        step()
    with pytest.warns(
        UserWarning, match="bf16 weights, 1 in all, were written through p.data between two"
    ):
        step()


def test_a_second_optimizer_is_named_by_counts_that_come_a_step_later(monkeypatch):
    """The first has stepped the weight again by then."""
    parameter = torch.nn.Parameter(torch.randn(64, 33).bfloat16())
    first, second = (
        torch_bf16.AdamW([parameter], lr=1e-3, recipe="bf16-fp32-master") for _ in range(2)
    )

    def step(optimizer):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    step(first)
    assert parameter.data.isfinite().all()  # a read, after which the bytes are known
    step(second)
    with monkeypatch.context() as patch:
        patch.setattr(HostCopy, "is_there", False)
        step(first)
    with pytest.warns(UserWarning, match="another optimizer has stepped 1 of the parameters"):
        step(first)


def refusal_of(name):
    def refuse(*_, **options):
        pytest.fail(f"torch.cuda.{name}() starts CUDA, which takes memory and forbids to fork")

    return refuse


@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])
def test_a_training_on_the_cpu_starts_no_cuda(recipe, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in (
        *("_lazy_init", "current_device", "current_stream", "synchronize", "get_rng_state"),
        *("is_current_stream_capturing", "get_device_properties", "get_device_name", "Stream"),
    ):
        monkeypatch.setattr(torch.cuda, name, refusal_of(name))
    model = torch_bf16.cast_model(torch.nn.Linear(8, 8), recipe)
    optimizer = torch_bf16.AdamW(model.named_parameters(), recipe=recipe)
    torch_bf16.accumulate_gradients(model, optimizer, "bf16_stochastic")
    average = torch_bf16.EMA(model, 0.9)
    for _ in range(10):
        for _ in range(2):
            model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        torch_bf16.clip_next_step(optimizer, 1.0, skip_nonfinite=True)
        optimizer.step()
        average.update_parameters(model, optimizer)
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    torch_bf16.fp32_state_dict(model, optimizer)


@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])
def test_a_state_follows_its_moved_model_bit_for_bit(found_there, recipe):
    stayed, *moved = found_there["moved"][recipe]
    assert moved == [stayed, stayed]
