"""FSDP1 through Accelerate, on ranks that are told that a CPU is a GPU."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version

from accelerate_bf16 import MODES

if Version(version("accelerate")) < Version("1.10"):
    pytest.skip(
        "compares with FSDP2, of which this Accelerate has nothing or half", allow_module_level=True
    )

import fsdp1_on_ranks as on_ranks
from sharded_llama import assert_same, averages

every_mode = pytest.mark.parametrize("mode", MODES)
every_kind = pytest.mark.parametrize("kind", ["SHARDED", "FULL"])


@averages
@every_mode
@pytest.mark.parametrize("late", [False, True], ids=["at-once", "optimizer-later"])
def test_training_has_the_bits_of_fsdp2(ranks, mode, late):
    ranks(2, on_ranks.training_has_the_bits_of_fsdp2, mode, late)


@pytest.mark.parametrize(
    ("load", "late"),
    [(on_ranks.constant, False), (on_ranks.nowhere, True)],
    ids=["wrong-on-the-others", "nowhere-on-the-others"],
)
def test_masters_are_those_of_the_first_rank(ranks, load, late):
    """The others have wrong weights, or none, as with ``cpu_ram_efficient_loading``."""
    ranks(2, on_ranks.masters_are_those_of_the_first_rank, load, late)


@every_mode
@every_kind
def test_a_resumed_run_repeats_itself_bit_for_bit(ranks, mode, kind, tmp_path):
    ranks(2, on_ranks.a_resumed_run_repeats_itself_bit_for_bit, mode, kind, tmp_path)


@every_mode
@every_kind
def test_one_rank_takes_over_what_two_have_saved(ranks, mode, kind, tmp_path):
    weights, states = ranks(2, on_ranks.saved, mode, kind, tmp_path)[0]
    found, found_states = ranks(1, on_ranks.takes_over, mode, kind, tmp_path)[0]
    assert_same(found, weights)
    assert_same(found_states, states)


@pytest.mark.parametrize(
    "claim",
    [
        on_ranks.a_model_that_another_mode_has_wrapped_is_refused,
        on_ranks.a_model_of_this_mode_is_taken_by_a_later_accelerator,
        on_ranks.an_optimizer_of_weights_that_are_nowhere_is_refused,
        on_ranks.clipping_takes_the_exact_norm_over_all_shards,
        on_ranks.micro_batches_are_reduced_as_by_hand,
        on_ranks.clipping_by_value_is_refused,
        on_ranks.what_stays_fp32_is_refused,
        on_ranks.parameters_that_are_not_the_original_ones_are_refused,
    ],
    ids=lambda claim: claim.__name__,
)
def test_on_two_ranks(ranks, claim):
    ranks(2, claim)


def test_the_trainer_trains_saves_and_resumes_bit_for_bit(ranks, tmp_path):
    ranks(2, on_ranks.the_trainer_trains_saves_and_resumes_bit_for_bit, tmp_path)
