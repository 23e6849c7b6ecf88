"""Memory as the system tells it: what is free, and peaks of other processes."""

import pytest
import torch
from bench_cases import SHAPES, entry

from torch_bf16.tools import system_memory
from torch_bf16.tools.bench.entries import ours
from torch_bf16.tools.bench.models import random_shapes
from torch_bf16.tools.bench.peaks import peak_bytes
from torch_bf16.tools.system_memory import available_bytes, peak_growth

CPU = torch.device("cpu")


def test_free_memory_is_known_here():
    assert available_bytes(CPU) > 2**20


def test_what_a_container_has_cached_of_files_can_be_used(monkeypatch, tmp_path):
    for name, text in (
        ("max", "1000"),
        ("current", "900"),
        ("stat", "file 700\ninactive_file 600"),
    ):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr(system_memory, "_CGROUP", tmp_path)
    assert available_bytes(CPU) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(CPU) > 2**20


def test_peak_memory_of_a_fresh_process_is_that_of_the_tensors():
    """4 million parameters: large beside what a process gains and loses for other reasons."""
    shapes = random_shapes(4_000_000, 6)
    total = sum(torch.Size(shape).numel() for shape in shapes)
    peak = peak_bytes(ours(["bf16-stochastic"])[0], shapes, 1)
    if peak is None:
        pytest.skip("this system does not tell")
    assert 7.9 < peak / total < 8.6


def test_a_process_that_fails_or_never_ends_has_no_peak(forked_workers):
    assert peak_bytes(entry(fault="constructor"), SHAPES, 1) is None
    assert peak_bytes(entry(fault="slow"), SHAPES, 1, seconds=0.1) is None


def test_peaks_of_another_process_are_those_of_its_second_call(forked_workers):
    found = peak_growth(_allocate, (1 << 20,), (64 << 20,), 1, 60)
    assert found is None or 0.9 * (64 << 20) < found < 1.5 * (64 << 20)


def _allocate(size):
    torch.ones(size, dtype=torch.uint8)
