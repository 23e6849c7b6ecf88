"""Stacks of matrices in one parameter, such as experts, cut in every way; and what is sent."""

import math

import pytest
import torch
import torch.distributed as dist
from sharded_training import assert_same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_bf16

# Placements of a stack of six matrices of 8 by 12, and the mesh.
STACKS = [
    ((2,), (Shard(0),)),
    ((3,), (Shard(0),)),
    ((4,), (Shard(0),)),
    ((2,), (Shard(1),)),
    ((3,), (Shard(2),)),
    ((2, 2), (Shard(0), Shard(1))),
    ((2, 2), (Shard(0), Shard(2))),
    ((2, 2), (Replicate(), Shard(1))),
    ((1, 4), (Shard(1), Replicate())),
]
OTHERS = {"wide": (16, 40), "tall": (40, 16), "small": (8, 12), "again": (8, 12)}


def experts(make, mesh_shape=(), placements=()):
    """What a stack and matrices end as, trained by clipped steps, some of which leave some out."""
    shapes = {"experts": (6, 8, 12), **OTHERS}
    mesh = init_device_mesh("cpu", mesh_shape) if mesh_shape else None

    def placed(name, whole):
        whole = whole.bfloat16()
        if mesh is None:
            return whole
        where = placements if name == "experts" else [Shard(0)] * len(mesh_shape)
        return distribute_tensor(whole, mesh, where)

    generator = torch.Generator().manual_seed(5)
    named = {
        name: nn.Parameter(placed(name, torch.randn(shape, generator=generator)))
        for name, shape in shapes.items()
    }
    if make == "muon":
        optimizer = torch_bf16.Muon(named.items(), lr=0.02, backend="eager")
    else:
        optimizer = torch_bf16.Adafactor(named.items(), backend="eager")
    for step in range(5):
        for n, (name, shape) in enumerate(shapes.items()):
            gradient = torch.randn(shape, generator=generator) / 8
            named[name].grad = None if (step + n) % 4 == 3 else placed(name, gradient)
        optimizer.scale_next_step(0.5)
        optimizer.step()
    whole = {}
    for name, parameter in named.items():
        every = {"": parameter.detach(), **optimizer.state[parameter]}
        whole |= {
            f"{name}/{key}": getattr(x, "full_tensor", lambda x=x: x)() for key, x in every.items()
        }
    return whole


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("make", ["muon", "adafactor"])
def test_stacks_of_experts_equal_one_process_however_cut(ranks, make, world):
    expected = experts(make)
    for mesh, placements in STACKS:
        if math.prod(mesh) == world:
            for found in ranks(world, experts, make, mesh, placements):
                assert_same(expected, found, f"{mesh} {placements}")


def counted(make, mesh, placements):
    """Bytes that this rank sends."""
    sent, real = [], dist.batch_isend_irecv

    def counting(operations):
        sent.append(sum(each.tensor.numel() for each in operations if each.op is dist.isend))
        return real(operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", counting)
        experts(make, mesh, placements)
    return sum(sent)


def test_two_ranks_send_what_the_documentation_says(ranks):
    """Half of each matrix goes to its owner in every step that it takes; answers come back."""
    elements = sum(4 * math.prod(shape) for shape in ((6, 8, 12), *OTHERS.values())) - 96
    factors = 4 * (6 * (8 + 12) + 2 * (16 + 40) + 2 * (8 + 12) + 5) - (8 + 12 + 1)
    found = {
        (make, where): sum(ranks(2, counted, make, (2,), (Shard(where),)))
        for make, where in (("muon", 0), ("muon", 1), ("adafactor", 1))
    }
    # Bytes of each element there and back; lengths are rounded up to 16.
    assert found["muon", 1] == pytest.approx(elements * (2 + 2) / 2, rel=0.02)
    assert found["adafactor", 1] == pytest.approx(elements * (2 + 2) / 2 + 4 * factors, rel=0.02)
    # Experts of which a rank has all go nowhere.
    assert found["muon", 0] == pytest.approx((elements - 4 * 576) * (2 + 2) / 2, rel=0.02)
