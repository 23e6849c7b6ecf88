"""``reduce="bf16_wire"`` through DDP, FSDP1 and FSDP2 of Trainer and Fabric."""

from __future__ import annotations

import pytest
import torch
from lightning_reduction import FABRIC, TRAINER, trained


@pytest.mark.parametrize("package", [TRAINER, FABRIC])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_gradients_travel_in_bf16(ranks, package, strategy):
    (own, none), _ = ranks(2, trained, package, strategy, None)
    (wire, exchanges), _ = ranks(2, trained, package, strategy, "bf16_wire")
    assert none == 0
    assert exchanges >= 4
    for name, weight in own.items():
        # The sum of two has one order: what FSDP reduces in fp32 is the same bits.
        if strategy == "ddp":
            torch.testing.assert_close(wire[name], weight, rtol=0.05, atol=0.05)
        else:
            assert torch.equal(wire[name], weight), name
