"""Every strategy, recipe, host and package: fit, resume, clip, accumulate, over gloo.

In each cell the replicas of every weight and state are bit-identical, the way of the weights is
that of fp32 training, the norm that clips is that of fp64, and what goes on from a checkpoint ends
with the bits of what was not interrupted.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from lightning_models import FABRICS, MODES, TRAINERS, network
from matrix import clip, fit, go_on, look_at_matrices, stop, stop_and_go_on
from matrix_cells import CELLS, LIMIT, RESHARDED, Cell, in_fp32
from sharded_training import assert_same

# How far the way of the weights may be from that in fp32: gradients in bf16 are small sums of
# larger terms, and weights that are rounded stochastically at each step have the noise of that. A
# missing sum, mean or clipping is at least 0.5, here or in the norm of the gradients.
WITHIN = {"bf16-fp32-master": 0.06, "bf16-stochastic": 0.12}
NORM_WITHIN = 0.01

WAYS = {
    f"{strategy}-{world}-{mode}": [
        cell for cell in CELLS if (cell.strategy, cell.world, cell.mode) == (strategy, world, mode)
    ]
    for strategy, world, mode in dict.fromkeys((c.strategy, c.world, c.mode) for c in CELLS)
}
# Each host both ways, and each strategy, in one recipe each.
RESUMED = [
    pytest.param(
        *(Cell(strategy, (world, 1), package, mode) for world in (before, 6 - before)),
        id=f"{strategy}-{before}-to-{6 - before}-{package}-{mode}",
    )
    for (strategy, package), mode, before in zip(
        RESHARDED, (*MODES, *reversed(MODES)), (2, 4, 4, 2), strict=True
    )
]


# Both packages are one source under two names, and a test below has both train the same bits. Each
# strategy and host is in one recipe in four processes, and in the other in two.
CLIPPED = [
    cell
    for cell in CELLS
    if cell.package.startswith("lightning.") and (cell.world == 4 or cell.mode == MODES[1])
]
in_fp32 = functools.cache(in_fp32)


@pytest.fixture(scope="module")
def fits(ranks):
    """``fits(cell)``: what all ranks of it ended with, who train once."""
    return functools.cache(lambda cell, *given: alike(ranks(cell.world, fit, cell, *given)))


def alike(everywhere):
    for each in everywhere[1:]:
        assert_same(everywhere[0], each)
    return everywhere[0]


def skip_sums(cell):
    if "fsdp2" in cell.strategy and torch.__version__ < "2.8":
        pytest.skip("torch 2.7's FSDP2 sums gradients over gloo where it should average")


def assert_near_fp32(cell, numbers, together):
    skip_sums(cell)
    expected, _ = in_fp32(first_of(cell), together)
    torch.manual_seed(3)
    first = [p.detach() for p in network().parameters()]
    ended = [tensor for name, tensor in numbers.items() if "/" not in name]
    went = torch.cat([(w.double() - f).flatten() for w, f in zip(ended, first, strict=True)])
    should = torch.cat([(e.double() - f).flatten() for e, f in zip(expected, first, strict=True)])
    assert (went - should).norm() < WITHIN[cell.mode] * should.norm()


def first_of(cell):
    """A cell with the same data: in fp32 it is no other."""
    return next(each for each in CELLS if each.mesh[0] == cell.mesh[0])


# One test for all packages and hosts of a way: pytest-xdist may give tests to workers that would
# have to train the same again.
@pytest.mark.parametrize("cells", WAYS.values(), ids=WAYS)
def test_hosts_of_both_packages_train_the_same_bits_which_go_the_way_of_fp32(fits, cells):
    first, *others = cells
    assert others
    assert_near_fp32(first, fits(first), together=False)
    for cell in others:
        assert_same(fits(first), fits(cell), cell.id)


@pytest.mark.parametrize("cell", CLIPPED, ids=lambda cell: cell.id)
def test_clipping_by_the_norm_of_micro_batches_is_fp32s_and_a_resumed_run_has_the_same_bits(
    ranks, cell, tmp_path
):
    found = ranks(cell.world, clip, cell)
    numbers = alike([numbers for numbers, _, _ in found])
    assert_near_fp32(cell, numbers, together=True)
    _, expected = in_fp32(first_of(cell), True)
    for _, steps, norms in found:
        assert len(norms) == steps == len(expected)
        for (exact, clipped_by), fp32 in zip(norms, expected, strict=True):
            assert exact > 2 * LIMIT
            assert abs(clipped_by / exact - 1) < 1e-5, (exact, clipped_by)
            assert abs(exact / fp32 - 1) < NORM_WITHIN, (exact, fp32)
    resumed = ranks(cell.world, stop_and_go_on, cell, tmp_path / "half.ckpt")
    assert_same(numbers, alike(resumed))


@pytest.mark.parametrize(("before", "after"), RESUMED)
def test_fsdp_goes_on_on_another_number_of_ranks(ranks, fits, before, after, tmp_path):
    """On data that are the same on every rank: how many there are changes nothing."""
    skip_sums(before)
    path = tmp_path / "half.ckpt"
    ranks(before.world, stop, before, path)
    found = ranks(after.world, go_on, after, path)
    assert_same(fits(replace(before, mesh=(2, 1)), True), alike(found))


@pytest.mark.parametrize("package", [TRAINERS[0], FABRICS[1]])
@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_whole_matrices_under_fsdp2_have_the_bits_of_ddp(ranks, name, package):
    cells = [Cell(way, (2, 1), package, MODES[0]) for way in ("ddp", "fsdp2")]
    replicas, shards = (alike(ranks(2, look_at_matrices, cell, name)) for cell in cells)
    state = {"Muon": "momentum_buffer", "Adafactor": "row_var"}[name]
    assert any(each.endswith(state) for each in shards)
    assert_same(replicas, shards)
