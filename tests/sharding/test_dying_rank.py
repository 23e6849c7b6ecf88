"""A rank that is killed ends the others soon and by an error; the last checkpoint goes on."""

import pytest
import torch.distributed.checkpoint as dcp
from dying_rank import LAST, RECIPE, TIMEOUT, WORLD, run
from ranks import RankError
from sharded_models import ALONE
from sharded_training import Run, assert_same, joined

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("when", ["step", "save"])
def test_a_rank_that_is_killed_ends_the_others_and_the_last_checkpoint_goes_on(
    ranks, when, tmp_path
):
    with pytest.raises(RankError, match="rank 1: ended with -9") as failure:
        ranks(WORLD, run, tmp_path, when, timeout=TIMEOUT, grace=TIMEOUT + 10)
    survivor, _ = failure.value.outcomes
    assert survivor.startswith("Traceback")
    assert "RuntimeError" in survivor or "CheckpointException" in survivor
    # By what the sockets tell; torch 2.7 has one more word for it.
    words = ("remote worker", "Timed out", "Connection reset by peer", "Connection closed by peer")
    assert any(each in survivor for each in words)
    # No half-written checkpoint loads: what lists its parts is written last.
    assert not (tmp_path / str(LAST) / ".metadata").exists()
    if when == "save":
        assert (tmp_path / str(LAST)).is_dir()
        with pytest.raises(dcp.api.CheckpointException, match=r"\.metadata|metadata is None"):
            Run(ALONE, RECIPE).load(tmp_path / str(LAST))
    expected = Run(ALONE, RECIPE).train(range(LAST + 4))
    found = Run(ALONE, RECIPE).load(tmp_path / str(LAST - 1)).train(range(LAST, LAST + 4))
    assert_same(joined([expected.parts()]), joined([found.parts()]))
