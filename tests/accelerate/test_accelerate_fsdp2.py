"""FSDP2 and tensor parallelism through Accelerate, on ranks that are told that a CPU is a GPU."""

from __future__ import annotations

import functools
from importlib.metadata import version

import pytest
import torch
from accelerate.utils import GradientAccumulationPlugin
from launching import launched_environment
from packaging.version import Version

from accelerate_bf16 import MODES, BF16RecipeKwargs

if Version(version("accelerate")) < Version("1.10"):
    pytest.skip(
        "this Accelerate has no FSDP2, or one without whole state dicts", allow_module_level=True
    )

import fsdp2_on_ranks as on_ranks
from sharded_llama import assert_same, averages, contents, loss_of, prepared
from sharded_llama import on_ranks as on_each_rank

ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false"}
CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16-fp32-master
num_machines: 1
num_processes: 1
main_process_port: 0
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""
every_mode = pytest.mark.parametrize("mode", MODES)
every_kind = pytest.mark.parametrize("kind", ["SHARDED", "FULL"])


def test_the_launchers_options_are_enough_and_one_rank_says_what_is_trained(ranks):
    options = ["--num_processes", "2", "--num_machines", "1", "--dynamo_backend", "no"]
    options += ["--mixed_precision", "bf16-stochastic", "--use_fsdp", "--fsdp_version", "2"]
    options += ["--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
    told = launched_environment(*options, "--main_process_port", "0", **ENVIRONMENT)
    line = "mixed_precision=bf16-stochastic: 35.1 k parameters (35.1 k bfloat16), 8.03 bytes per"
    assert "".join(ranks(2, on_ranks.trained_as_launched, told)).count(line) == 1


@pytest.fixture(scope="module")
def trained(ranks):
    """``trained(mode)``: by nothing but FSDP2; losses and contents of each rank."""
    return functools.cache(lambda mode: ranks(2, on_ranks.trained, mode, "nothing"))


@pytest.mark.parametrize(
    ("around", "mode"),
    [
        (around, mode)
        for around in on_ranks.AROUND
        for mode in MODES
        # To compile takes longer than all others, and knows no more of the mode.
        if around != "nothing" and (around, mode) != ("compiled", MODES[1])
    ],
)
def test_what_accelerate_does_around_sharding_changes_no_bit(ranks, trained, around, mode):
    if around == "compiled" and torch.__version__ < "2.12":
        pytest.skip("what torch 2.7 and 2.11 compile has other bits, in stock bf16 as well")
    found = ranks(2, on_ranks.trained, mode, around)
    for (losses, numbers), (known, expected) in zip(found, trained(mode), strict=True):
        assert losses == known
        assert_same(numbers, expected)


@averages
@every_mode
@pytest.mark.parametrize("name", ["AdamW", "Muon", "Adafactor"])
def test_training_has_the_bits_of_ddp(ranks, mode, name):
    ranks(2, on_ranks.training_has_the_bits_of_ddp, mode, name)


@on_each_rank()
def released_sums_have_the_bits_of_others(sync_each):
    found = []
    for release in (False, True):
        sums = GradientAccumulationPlugin(num_steps=2, sync_each_batch=sync_each)
        made, model, optimizer = prepared(
            "bf16-stochastic",
            kwargs_handlers=[BF16RecipeKwargs(release_gradients=release)],
            gradient_accumulation_plugin=sums,
        )
        for step in range(4):
            with made.accumulate(model):
                made.backward(loss_of(made, model, step))
                if made.sync_gradients:
                    assert release == all(p.grad is None for p in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
        assert {int(state["step"]) for state in optimizer.optimizer.state.values()} == {2}
        found.append(contents(model, optimizer))
    assert_same(*found)


@pytest.mark.parametrize("sync_each", [False, True])
def test_released_sums_have_the_bits_of_others(ranks, sync_each):
    """FSDP2 hides the passes that it does not reduce."""
    ranks(2, released_sums_have_the_bits_of_others, sync_each)


@pytest.mark.skipif(version("transformers") < "5", reason="tensor parallelism came with 5")
@every_mode
def test_tensor_parallelism_trains_the_same_on_every_rank(ranks, mode, tmp_path):
    if torch.__version__ < "2.8":
        ranks.close()  # in a process that sharded an embedding before, it finds no mask
    ranks(2, on_ranks.tensor_parallelism_trains_the_same_on_every_rank, mode, tmp_path)


@every_mode
@every_kind
def test_a_resumed_run_repeats_itself_bit_for_bit(ranks, mode, kind, tmp_path):
    ranks(2, on_ranks.a_resumed_run_repeats_itself_bit_for_bit, mode, kind, tmp_path)


@every_mode
@every_kind
def test_one_rank_takes_over_what_two_have_saved(ranks, mode, kind, tmp_path):
    expected = ranks(2, on_ranks.saved, mode, kind, tmp_path)[0]
    assert_same(ranks(1, on_ranks.taken_over, mode, kind, tmp_path)[0], expected)


def test_one_rank_of_a_configuration_file_takes_over(ranks, tmp_path):
    mode = "bf16-fp32-master"
    expected = ranks(2, on_ranks.saved, mode, "SHARDED", tmp_path)[0]
    (tmp_path / "config.yaml").write_text(CONFIG)
    told = launched_environment("--config_file", tmp_path / "config.yaml", **ENVIRONMENT)
    found = ranks(1, on_ranks.taken_over_as_launched, told, mode, tmp_path)[0]
    assert_same(found, expected)


@pytest.mark.parametrize(
    "claim",
    [
        on_ranks.masters_start_from_the_weights_that_the_user_had,
        on_ranks.clipping_takes_the_exact_norm_and_leaves_gradients_unwritten,
        on_ranks.micro_batches_are_reduced_once,
        on_ranks.sums_in_fp32_reach_the_step,
        on_ranks.what_stays_fp32_is_a_group_of_its_own,
        on_ranks.what_would_be_fp32_beside_bf16_in_one_group_is_refused,
        on_ranks.adapters_stay_fp32_beside_a_bf16_base,
        on_ranks.models_that_are_sharded_already_and_ones_prepared_again,
    ],
    ids=lambda claim: claim.__name__,
)
def test_on_two_ranks(ranks, claim):
    ranks(2, claim)


def test_the_trainer_trains_saves_and_resumes_bit_for_bit(ranks, tmp_path):
    ranks(2, on_ranks.the_trainer_trains_saves_and_resumes_bit_for_bit, tmp_path)
