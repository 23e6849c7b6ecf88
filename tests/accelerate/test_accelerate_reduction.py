"""``reduce="bf16_wire"`` through DDP, FSDP1 and FSDP2 of Accelerate."""

from __future__ import annotations

import accelerate_reduction as on_ranks
import pytest
from torch.distributed.fsdp import FSDPModule

of_fsdp2 = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"),
    reason="this torch's fully_shard takes no other reduction, and that is refused",
)
RUNS = [
    on_ranks.under_ddp,
    on_ranks.under_fsdp1,
    pytest.param(on_ranks.under_fsdp2, marks=of_fsdp2),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_gradients_travel_in_bf16(ranks, run):
    ranks(2, run)
