"""What is wrong when an intact file cannot be loaded is not called damage."""

import pytest
import torch

from torch_bf16 import CheckpointError, load_checkpoint
from torch_bf16.checkpoints.reader import open_checkpoint


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes")]
)
def test_a_file_for_which_memory_lacks_is_not_called_damaged(error, tmp_path, monkeypatch):
    def load(*arguments, **options):
        raise error

    torch.save({"step": 1}, tmp_path / "run.pt")
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(MemoryError, match=r"too little free memory.*The file is not at fault"):
        load_checkpoint(tmp_path / "run.pt")


def test_a_file_of_the_old_format_is_not_called_damaged(tmp_path):
    torch.save({"step": 1}, tmp_path / "run.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="no checksums that would tell whether it is whole"):
        load_checkpoint(tmp_path / "run.pt")


@pytest.mark.parametrize("text", ["hello\n", "epoch,loss\n1,0.5\n"])
def test_a_file_of_text_is_said_to_be_no_pickle(text, tmp_path):
    (tmp_path / "run.pt").write_text(text)
    with pytest.raises(CheckpointError, match=r"numbers: it is no pickle \(\w+Error: "):
        open_checkpoint(tmp_path / "run.pt")
