"""Scripts and Trainers under DeepSpeed, by the mode's name alone."""

from __future__ import annotations

import pytest
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from deepspeed_on_ranks import everything, killed, trainer
from deepspeed_ranks import WITH_DEEPSPEED, on_fresh_ranks
from deepspeed_stall import NEAREST, OURS
from ranks import RankError

pytestmark = WITH_DEEPSPEED


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two ranks has found."""
    folder = tmp_path_factory.mktemp("deepspeed")
    with pytest.raises(RankError, match="ended with -9"):
        on_fresh_ranks(tmp_path_factory.mktemp("killed"), 2, killed, folder / "killed")
    return on_fresh_ranks(folder, 2, everything, folder)


def test_an_unchanged_script_trains_in_the_mode(found):
    for rank in found:
        for case, its in {**rank["scripts"], "accumulated": rank["accumulated"]}.items():
            assert its["optimizer"] == "torch_bf16.optim.adam", case
            assert its["mode"] == its["recipe"]
            assert its["bf16"]
            assert its["learned"]
            assert its["aliased"]


def test_its_scheduler_knows_the_groups_that_were_made_for_vectors(found):
    for its in found[0]["scripts"].values():
        assert its["decayed"]
        assert its["lrs"]


def test_stages_and_ranks_end_with_the_same_bits(found):
    scripts = [
        rank["scripts"][f"ZeRO-{stage} bf16-stochastic"] for rank in found for stage in (1, 3)
    ]
    assert len({each["weights"] for each in scripts}) == 1


def test_save_state_and_load_state_keep_all_bits(found):
    for rank in found:
        for stage, (whole, cut) in rank["resumed"].items():
            assert cut == whole, stage


def test_small_steps_go_as_far_as_with_fp32_masters(found):
    for rank in found:
        assert abs(rank["small steps"][NEAREST]) < 0.1
        assert rank["small steps"][OURS] == pytest.approx(1, abs=0.05)


def test_a_state_that_was_half_saved_over_an_older_one_is_refused(found):
    for rank in found:
        assert "are of different steps, step 8 and step 16" in rank["after kill"]


def test_a_configuration_file_with_auto_values_is_filled_in(found):
    assert found[0]["file"] == "torch_bf16.optim.adam"


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("contradiction", '"bf16_optimizer_states": false (in bf16)'),
        ("disabled", '"enabled": false (in bf16)'),
        ("fp32 sums", '"grad_accum_dtype": "fp32" (in data_types)'),
        ("offload", '"device": "cpu" (in zero_optimization.offload_optimizer)'),
        ("offloaded weights", '"device": "nvme" (in zero_optimization.offload_param)'),
        ("optimizer", '"optimizer": {...}'),
        ("no ZeRO", "zero_optimization.stage is 0"),
        ("tensor parallelism", '"autotp_size": 2 (in tensor_parallel)'),
        ("ZeRO++", '"zero_quantized_weights": true (in zero_optimization)'),
        ("keep_fp32", "keeps 2 parameters in float32 ('1.bias'"),
        ("released", "release_gradients=True cannot be combined"),
    ],
)
def test_a_wrong_configuration_is_refused_by_its_line(found, case, line):
    assert line in found[0]["refusals"][case]


def test_the_launcher_passes_the_mode_on():
    given = ["--use_deepspeed", "--zero_stage", "2", "--num_processes", "2"]
    mode = ["--mixed_precision", "bf16-stochastic", "x.py"]
    arguments = launch_command_parser().parse_args([*given, "--num_machines", "1", *mode])
    arguments.deepspeed_fields_from_accelerate_config = ""
    environment = prepare_deepspeed_cmd_env(arguments)[1]
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16-stochastic"
    assert environment["BF16_MODE"] == "bf16-stochastic"


def test_the_trainer_learns_and_resumes_with_all_bits(tmp_path):
    for its in on_fresh_ranks(tmp_path, 2, trainer, 3, tmp_path):
        assert its["optimizer"] == "torch_bf16.optim.adam"
        assert its["learned"]
        assert its["weights"][0] == its["weights"][1]
        assert its["states"][0] == its["states"][1]
