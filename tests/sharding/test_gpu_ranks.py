"""DDP and FSDP2 over NCCL where there are GPUs, and the same bodies over gloo on this machine."""

import pytest
from device_ranks import ddp, fsdp2
from gpu_marks import gpus
from optimizer_cases import assert_same

# NCCL refuses two ranks on a GPU.
PLACES = [
    ("cpu", 2),
    pytest.param("cuda", 1, marks=gpus(1)),
    pytest.param("cuda", 2, marks=gpus(2)),
]
pytestmark = [
    pytest.mark.parametrize(("device", "world"), PLACES),
    pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"]),
]


def test_replicas_have_the_bits_of_eager_and_of_each_other(ranks, device, world, recipe):
    ours = ranks(world, ddp, device, recipe, None, device=device)
    eager = ranks(world, ddp, device, recipe, "eager", device=device)
    for replica in ours:
        assert_same(replica, ours[0])
    assert_same(ours[0], eager[0])


def test_shards_have_the_bits_of_eager(ranks, device, world, recipe):
    ours = ranks(world, fsdp2, device, recipe, None, device=device)
    eager = ranks(world, fsdp2, device, recipe, "eager", device=device)
    assert_same(ours[0], eager[0])
