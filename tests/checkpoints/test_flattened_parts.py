"""One rank's parts under FSDP1 are not saved as if they were all."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_bf16 import CheckpointError, save_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def model():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield FullyShardedDataParallel(
        torch.nn.Linear(4, 4), use_orig_params=True, device_id=torch.device("cpu")
    )
    dist.destroy_process_group()


def test_one_ranks_part_under_fsdp1_is_refused(model, tmp_path):
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match=r"'made' is an optimizer of .* FullyShardedData"):
        save_checkpoint(tmp_path / "run.pt", made=optimizer)
    assert not [*tmp_path.iterdir()]
