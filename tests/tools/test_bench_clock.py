"""The clock of a GPU: what it times, and that it never waits inside a step."""

import contextlib
import json

import pytest
import torch

from torch_bf16.tools import cli
from torch_bf16.tools.bench.clock import CpuClock, CudaClock, clock_for

GPU = torch.device("cuda", 0)
TRACE = [
    {"cat": "kernel", "name": "adamw"},
    {"cat": "kernel", "name": "adamw"},
    {"cat": "gpu_memcpy", "name": "Memcpy HtoD"},
    {"cat": "gpu_user_annotation", "name": "Optimizer.step#AdamW.step"},
    {"cat": "cuda_runtime", "name": "cudaLaunchKernel"},
    {"name": "no category"},
]


@pytest.fixture
def log(monkeypatch):
    """What a device without a GPU is asked for, in order."""
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("event")

        def elapsed_time(self, other):
            return 10.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    return calls


def test_steps_are_timed_in_a_row_and_the_host_on_an_idle_device(log):
    seconds, host = CudaClock(GPU).time(lambda: log.append("step"))
    assert log == ["wait", "step", "event", *["step"] * 5, "event", "wait"]
    assert seconds == pytest.approx(10e-3 / 5)
    assert 0 < host < 1


def fake_profiler(monkeypatch, events):
    class Profiler(contextlib.nullcontext):
        def __enter__(self):
            return self

        def export_chrome_trace(self, path):
            with open(path, "w") as file:
                json.dump({"traceEvents": events}, file)

    monkeypatch.setattr(torch.profiler, "profile", lambda **_: Profiler())


def test_launches_are_kernels_and_no_annotations(log, monkeypatch):
    fake_profiler(monkeypatch, TRACE)
    launches = CudaClock(GPU).launches(lambda: log.append("step"))
    assert launches == {"kernels": 2, "copies": 1, "fills": 0}
    assert log == ["wait", "step", "wait"]


def test_a_driver_that_hides_its_kernels_gives_no_count(log, monkeypatch):
    fake_profiler(monkeypatch, TRACE[2:])
    assert CudaClock(GPU).launches(lambda: None) is None


def test_a_clock_for_each_device(log):
    assert type(clock_for(torch.device("cpu"))) is CpuClock
    assert type(clock_for(GPU)) is CudaClock


def test_a_cpu_step_is_timed_on_its_own():
    steps = []
    seconds, host = CpuClock(torch.device("cpu")).time(lambda: steps.append(1))
    assert len(steps) == 1
    assert 0 < seconds == host


def test_on_a_cpu_a_step_is_also_timed_right_after_a_product(log, monkeypatch):
    order, product = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **b: (order.append("product"), product(*a, **b)))
    seconds = CpuClock(torch.device("cpu")).time_after_product(lambda: order.append("step"))
    assert order == ["product", "step"]
    assert seconds > 0
    assert CudaClock(GPU).time_after_product(lambda: order.append("step")) is None
    assert len(order) == 2


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA or ROCm device, and pytest -m gpu"
)
def test_the_command_on_a_gpu(tmp_path, capsys):
    # Any matrix product before has left a workspace.
    before = torch.cuda.memory_allocated()
    file = tmp_path / "figures.json"
    wanted = ["--device", "cuda", "--parameters", "1e7", "--tensors", "30", "--rounds", "3"]
    wanted += ["--ways", "moved,graph,zero-rows"]
    assert cli.main(["bench", *wanted, "--backend", "triton", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["failed"] == {}
    for row in record["results"]:
        assert row["peak_bytes_per_parameter"] >= 0.99 * row["bytes_per_parameter"]
        assert row["share_of_copy"] > 0
        assert row["launches"] is None or row["launches"]["kernels"] > 0
    assert torch.cuda.memory_allocated() < before + (1 << 20)
