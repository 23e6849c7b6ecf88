"""FSDP2 through Accelerate: one launch on two ranks makes every check, another takes over."""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest
from launching import SCRIPTS, launched
from packaging.version import Version

if Version(version("accelerate")) < Version("1.10"):
    pytest.skip(
        "this Accelerate has no FSDP2, or one without whole state dicts", allow_module_level=True
    )

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]
CHECKS = [
    "the_launchers_options_are_enough",
    "training_has_the_bits_of_ddp",
    "masters_start_from_the_weights_that_the_user_had",
    "what_accelerate_does_around_sharding_changes_no_bit",
    "clipping_takes_the_exact_norm_and_leaves_gradients_unwritten",
    "micro_batches_are_reduced_once",
    "sums_in_fp32_reach_the_step",
    "what_stays_fp32_is_a_group_of_its_own",
    "adapters_stay_fp32_beside_a_bf16_base",
    "models_that_are_sharded_already_and_ones_prepared_again",
    "a_resumed_run_repeats_itself_bit_for_bit",
    "tensor_parallelism_trains_the_same_on_every_rank",
    "the_trainer_trains_saves_and_resumes_bit_for_bit",
]
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp2")


@pytest.fixture(scope="module")
def two_ranks(folder):
    command = [*LAUNCH, "--num_processes", "2"]
    command += ["--num_machines", "1", "--dynamo_backend", "no", "--main_process_port", "0"]
    command += ["--mixed_precision", "bf16-stochastic", "--use_fsdp", "--fsdp_version", "2"]
    command += ["--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
    return launched([*command, SCRIPTS / "fsdp2.py", folder], folder, **ENVIRONMENT)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(two_ranks, name):
    failed, _ = two_ranks
    assert not failed[name], failed[name]


def test_every_check_is_named_here_and_one_rank_says_what_is_trained(two_ranks):
    failed, stderr = two_ranks
    assert list(failed) == CHECKS
    line = "mixed_precision=bf16-stochastic: 35.1 k parameters (35.1 k bfloat16), 8.03 bytes per"
    assert line in stderr


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


def test_one_rank_of_a_configuration_file_takes_over(two_ranks, folder):
    (folder / "config.yaml").write_text(CONFIG)
    launch = [*LAUNCH, "--config_file", folder / "config.yaml"]
    failed, _ = launched([*launch, SCRIPTS / "fsdp2.py", folder], folder, **ENVIRONMENT)
    assert failed == {"other_ranks_take_over": ""}
