"""Folders whose files make up one checkpoint only together."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torch_bf16.checkpoints.reader import open_checkpoint
from torch_bf16.errors import CheckpointError

safetensors = pytest.importorskip("safetensors.torch")


def test_numbered_files_without_an_index_are_whole_or_refused(tmp_path):
    for number in (1, 2, 3):
        name = f"model-{number:05}-of-00003.safetensors"
        safetensors.save_file({f"w{number}": torch.ones(2)}, tmp_path / name)
    assert open_checkpoint(tmp_path).tensors.keys() == {"w1", "w2", "w3"}
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither an index nor model-00002-of-00003"):
        open_checkpoint(tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")  # DCP without a process group
def test_all_models_that_accelerate_has_sharded_are_read(tmp_path):
    for number, names in enumerate((["w", "first"], ["w", "second"])):
        weights = {name: torch.full((2,), float(number)) for name in names}
        dcp.save({"model": weights}, checkpoint_id=tmp_path / f"pytorch_model_fsdp_{number}")
    found = open_checkpoint(tmp_path).tensors
    assert found.keys() == {"w", "first", "1.w", "second"}
    assert torch.equal(found["1.w"].whole(), torch.ones(2))
