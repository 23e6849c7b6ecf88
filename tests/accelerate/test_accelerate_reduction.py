"""``reduce="bf16_wire"`` through DDP, FSDP1 and FSDP2 of Accelerate."""

from __future__ import annotations

import accelerate_reduction as on_ranks
import pytest

RUNS = [on_ranks.under_ddp, on_ranks.under_fsdp1, on_ranks.under_fsdp2]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_gradients_travel_in_bf16(ranks, run):
    ranks(2, run)
