"""Trainer and Fabric with DeepSpeedStrategy, by the precision's name alone."""

from __future__ import annotations

import pytest
from deepspeed_ranks import WITH_DEEPSPEED, on_fresh_ranks
from deepspeed_stall import NEAREST, OURS
from deepspeed_strategy_on_ranks import alone as run_alone
from deepspeed_strategy_on_ranks import everything

pytestmark = WITH_DEEPSPEED


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two ranks has found."""
    folder = tmp_path_factory.mktemp("deepspeed")
    return on_fresh_ranks(folder, 2, everything, folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one rank has found."""
    folder = tmp_path_factory.mktemp("alone")
    return on_fresh_ranks(folder, 1, run_alone, folder)[0]


@pytest.mark.parametrize("host", ["trainer", "fabric"])
def test_an_unchanged_program_trains_in_the_mode(found, host):
    for rank in found:
        for its in rank[host].values():
            assert its["optimizer"] == "torch_bf16.optim.adam"
            assert its["learned"]


def test_its_scheduler_knows_the_groups_that_were_made_for_vectors(found):
    assert all(its["decayed"] == {True} for its in found[0]["trainer"].values())


@pytest.mark.parametrize("host", ["trainer", "fabric"])
def test_inputs_and_losses_stay_fp32(found, host):
    assert all(its["dtypes"] == {"torch.float32"} for its in found[0][host].values())


@pytest.mark.parametrize("host", ["trainer", "fabric"])
def test_stages_and_ranks_end_with_the_same_bits(found, host):
    every = [its["weights"] for rank in found for its in rank[host].values()]
    assert len({str(each) for each in every}) == 1


def test_a_fit_that_was_resumed_ends_with_the_bits_of_one_that_was_not(found, alone):
    for rank in [*found, alone]:
        for its in rank["trainer"].values():
            assert its["weights"][0] == its["weights"][1]
            assert its["states"][0] == its["states"][1]


def test_small_steps_go_as_far_as_with_fp32_masters(alone):
    assert abs(alone["small steps"][NEAREST]) < 0.1
    assert alone["small steps"][OURS] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("flags", '"enabled": false (in bf16)'),
        ("keep_fp32", "keeps 2 parameters in float32 ('network.1.bias'"),
        ("no ZeRO", "zero_optimization.stage is 0"),
        ("offload", '"device": "cpu" (in zero_optimization.offload_optimizer)'),
        ("released", "release_gradients=True cannot be used with DeepSpeedStrategy"),
    ],
)
def test_a_wrong_configuration_is_refused_by_its_line(found, case, said):
    assert said in found[0]["refusals"][case]
