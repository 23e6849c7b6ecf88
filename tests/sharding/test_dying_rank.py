"""A rank that is killed ends the others soon and by an error; the last checkpoint goes on."""

import signal
import time
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from dying_rank import LAST, RECIPE, TIMEOUT, WORLD
from ranks import started_ranks
from sharded_training import (
    EVEN,
    assert_same,
    gathered,
    make_model,
    optimizer_for,
    train_on_given_gradients,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import torch_bf16

SCRIPT = Path(__file__).parents[1] / "support" / "dying_rank.py"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def run_until_one_dies(folder):
    """The survivor's exit status, what it printed, and the seconds it took to end."""
    with started_ranks(SCRIPT, WORLD, folder) as processes:
        killed = processes[1].wait(120)
        died = time.monotonic()
        status = processes[0].wait(TIMEOUT + 30)
        took = time.monotonic() - died
    assert killed == -signal.SIGKILL, (folder / "1.log").read_text()[-2000:]
    return status, (folder / "0.log").read_text(), took


def plain():
    model = torch_bf16.cast_module(make_model(EVEN), RECIPE)
    return model, optimizer_for(model, RECIPE)


def load(folder):
    model, optimizer = plain()
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    return model, optimizer


@pytest.mark.parametrize("when", ["step", "save"])
def test_a_rank_that_is_killed_ends_the_others_and_the_last_checkpoint_goes_on(when, tmp_path):
    folder = tmp_path / when
    folder.mkdir()
    status, printed, took = run_until_one_dies(folder)
    assert status not in (0, -signal.SIGKILL)
    assert "went on" not in printed
    assert "RuntimeError" in printed or "CheckpointException" in printed
    assert "remote worker" in printed or "Timed out" in printed
    assert took < TIMEOUT + 10
    # No half-written checkpoint loads: what lists its parts is written last.
    assert not (folder / str(LAST) / ".metadata").exists()
    if when == "save":
        assert (folder / str(LAST)).is_dir()
        with pytest.raises(dcp.api.CheckpointException, match=r"\.metadata"):
            load(folder / str(LAST))
    expected, its = plain()
    train_on_given_gradients(expected, its, range(LAST + 4))
    model, optimizer = load(folder / str(LAST - 1))
    train_on_given_gradients(model, optimizer, range(LAST, LAST + 4))
    assert_same(gathered(expected, its, None), gathered(model, optimizer, None), when)
