"""What the benchmark says of memory: held, moved, peaks, and what fits together."""

import pytest
import torch
from bench_cases import PARAMETERS, SHAPES, entry

from torch_bf16 import RECIPES
from torch_bf16.tools.bench import memory
from torch_bf16.tools.bench.entries import ours
from torch_bf16.tools.bench.memory import (
    available_bytes,
    group_entries,
    held_bytes,
    moved_bytes,
    needed_bytes,
    peak_bytes,
)
from torch_bf16.tools.bench.models import random_shapes
from torch_bf16.tools.bench.peers import BASELINE, PEERS
from torch_bf16.tools.bench.time_limit import quiet

CPU = torch.device("cpu")
(TORCH, _) = PEERS["torch"].entries


def stepped(each, shapes):
    optimizer = each.make(shapes, CPU)
    with quiet():
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(("recipe", "states"), [("bf16-stochastic", 4), ("bf16-fp32-master", 10)])
def test_bytes_of_ours_are_those_of_the_formats(recipe, states):
    """Of a matrix; the vector has an exact master and fp32 moments in both."""
    (each,) = ours([recipe])
    assert RECIPES[recipe].bytes_per_parameter == 2 + states
    optimizer = stepped(each, [(48, 64), (64,)])
    matrix, vector, steps = 48 * 64, 64, 2 * 4
    held = (4 + states) * matrix + (4 + 10) * vector + steps
    assert held_bytes(optimizer) == held
    assert moved_bytes(optimizer) == 2 * held - 2 * (matrix + vector)


def test_torch_in_fp32_holds_16_bytes_and_moves_28():
    optimizer = stepped(TORCH, [(48, 64)])
    assert held_bytes(optimizer) == 16 * 48 * 64 + 4
    assert moved_bytes(optimizer) == 28 * 48 * 64 + 8


def test_tensors_are_found_wherever_a_library_keeps_them():
    """int8 codes in an object in a list in a dict; the gradient again, which counts once."""
    optimizer = stepped(entry(), SHAPES)
    assert held_bytes(optimizer) == (2 + 2 + 1) * PARAMETERS


def test_tensors_that_a_subclass_is_made_of_count():
    class Quantized(torch.Tensor):
        @staticmethod
        def __new__(cls, codes, scale):
            return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

        def __init__(self, codes, scale):
            self.codes, self.scale = codes, scale

        def __tensor_flatten__(self):
            return ["codes", "scale"], None

        def __torch_dispatch__(self, *arguments):
            raise AssertionError("nothing is computed here")

    optimizer = stepped(TORCH, [(48, 64)])
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    codes = torch.zeros(48, 64, dtype=torch.uint8)
    state["exp_avg"] = Quantized(codes, torch.zeros(48))
    assert held_bytes(optimizer) == (4 + 4 + 4 + 1) * 48 * 64 + 4 * 48 + 4


def test_peak_memory_of_a_fresh_process_is_that_of_the_tensors():
    """4 million parameters: large beside what a process gains and loses for other reasons."""
    shapes = random_shapes(4_000_000, 6)
    total = sum(torch.Size(shape).numel() for shape in shapes)
    peak = peak_bytes(ours(["bf16-stochastic"])[0], shapes, 1)
    if peak is None:
        pytest.skip("this system does not tell")
    assert 7.9 < peak / total < 8.6


def test_a_process_that_fails_or_never_ends_has_no_peak():
    assert peak_bytes(entry(fault="constructor"), SHAPES, 1) is None
    assert peak_bytes(entry(fault="slow"), SHAPES, 1, seconds=0.1) is None


def test_estimates_are_not_below_what_is_held():
    shapes = random_shapes(1_000_000, 6)
    for each in (*PEERS["torch"].entries, *ours(list(RECIPES))):
        assert needed_bytes(each, shapes) >= held_bytes(stepped(each, shapes)) * 0.99


def test_scratch_is_counted_for_the_largest_tensor():
    (peer,) = PEERS["torchastic"].entries
    assert needed_bytes(peer, [(10, 10), (100,), (30, 10)]) == 8 * 500 + 32 * 300


def test_free_memory_is_known_here():
    assert available_bytes(CPU) > 2**20


def test_what_a_container_has_cached_of_files_can_be_used(monkeypatch, tmp_path):
    for name, text in (
        ("max", "1000"),
        ("current", "900"),
        ("stat", "file 700\ninactive_file 600"),
    ):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert available_bytes(CPU) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(CPU) > 2**20


NEEDS = {"base": 8, "a": 4, "b": 4, "c": 4, "large": 12}


@pytest.mark.parametrize(
    ("names", "available", "most", "groups"),
    [
        ("base a b c large", None, None, ["base a b c large"]),
        ("base a b c large", 32, None, ["base a b c large"]),
        ("base a b c", 16, None, ["base a b", "base c"]),
        ("base a large b", 12, None, ["base a", "base b", "large"]),
        ("base large", 19, None, ["base", "large"]),
        ("base", 8, None, ["base"]),
        ("base a b c large", None, 3, ["base a b", "base c large"]),
        ("base a b c large", 32, 4, ["base a b c", "base large"]),
    ],
)
def test_groups_fit_and_have_the_baseline_in_them_where_it_fits(names, available, most, groups):
    fakes = {name: entry(name) for name in NEEDS}
    entries = [fakes[name] for name in names.split()]
    found = group_entries(entries, lambda e: NEEDS[e.name], available, most)
    assert [" ".join(each.name for each in group) for group in found] == groups


def test_the_baseline_is_known_by_its_name():
    assert TORCH.name == BASELINE
