"""Which entries of the benchmark are in memory together."""

import pytest
from bench_cases import TORCH, entry, stepped

from torch_bf16 import RECIPES
from torch_bf16.tools.bench.entries import ours
from torch_bf16.tools.bench.grouping import group_entries, needed_bytes
from torch_bf16.tools.bench.models import random_shapes
from torch_bf16.tools.bench.peers import BASELINE, PEERS
from torch_bf16.tools.optimizer_bytes import held_bytes


def test_estimates_are_not_below_what_is_held():
    shapes = random_shapes(1_000_000, 6)
    for each in (*PEERS["torch"].entries, *ours(list(RECIPES))):
        assert needed_bytes(each, shapes) >= held_bytes(stepped(each, shapes)) * 0.99


def test_scratch_is_counted_for_the_largest_tensor():
    (peer,) = PEERS["torchastic"].entries
    assert needed_bytes(peer, [(10, 10), (100,), (30, 10)]) == 8 * 500 + 32 * 300


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
