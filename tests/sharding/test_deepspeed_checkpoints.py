"""Checkpoints that DeepSpeed writes around our optimizers: killed, mixed up, and converted."""

from __future__ import annotations

import pytest
from deepspeed_ranks import WITH_DEEPSPEED, on_fresh_ranks
from deepspeed_saves import UNFINISHED, checkpoints, killed
from ranks import RankError

pytestmark = WITH_DEEPSPEED

# What torch.load says of files that are cut or gone; DeepSpeed loads them by it.
UNREADABLE = ("EOFError", "UnpicklingError", "RuntimeError", "OSError", "FileNotFoundError")


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """A folder in which two ranks were killed, one while it wrote its file."""
    folder = tmp_path_factory.mktemp("saves")
    with pytest.raises(RankError, match="ended with -9"):
        on_fresh_ranks(folder, 2, killed, folder / "saved")
    return folder / "saved"


@pytest.fixture(scope="module")
def found(left):
    """What each of two ranks has found."""
    return on_fresh_ranks(left, 2, checkpoints, left)


def test_the_checkpoint_before_the_one_that_was_being_saved_loads_with_all_bits(found):
    for rank in found:
        assert rank["after kill"]["resumed"] == rank["after kill"]["whole"]


@pytest.mark.parametrize("case", UNFINISHED)
def test_files_of_two_checkpoints_are_not_loaded_together(found, case):
    for rank in found:
        said = rank["unfinished"][case]
        if case == "finished":
            assert said == "nothing was refused"
        elif "cut" in case or "gone" in case:
            assert said.startswith(UNREADABLE)
        else:
            assert "are of different steps, step 3 and step 5" in said


def test_universal_checkpoints_lose_nothing_of_what_is_kept_like_matrices(found):
    for rank in found:
        for stage, its in rank["converted"].items():
            assert its["universal"] == its["whole"], stage


def test_zero_to_fp32_gives_the_bf16_weights(found):
    for rank in found:
        for stage, its in rank["converted"].items():
            assert its["fp32"] == its["saved"], stage
