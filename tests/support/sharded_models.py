"""A small model, every way to shard it, and which elements of it a rank then holds."""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

EVEN, UNEVEN, WIDE = (8, 24, 4), (5, 7, 3), (128, 256, 66)
THIRDS = (6, 12, 9)
STRATEGIES = {
    "fsdp1": ShardingStrategy.FULL_SHARD,
    "fsdp1-grad-op": ShardingStrategy.SHARD_GRAD_OP,
    "fsdp1-hybrid": ShardingStrategy.HYBRID_SHARD,
    "fsdp1-no-shard": ShardingStrategy.NO_SHARD,
}
# Bits as whole numbers, by bytes per element.
RAW = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Case:
    """A way to shard, and the mesh of all ranks."""

    way: str
    mesh: tuple[int, ...]
    sizes: tuple[int, int, int] = EVEN

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh)

    def id(self, *words: str) -> str:
        """``fsdp2-uneven-bf16-stochastic-4ranks``."""
        kinds = {EVEN: "", THIRDS: "", UNEVEN: "uneven", WIDE: "wide"}
        kind = kinds.get(self.sizes, "x".join(map(str, self.sizes)))
        mesh = "x".join(map(str, self.mesh))
        return "-".join(filter(None, (self.way, kind, *words, f"{mesh}ranks")))


ALONE = Case("alone", (1,))


class Model(nn.Module):
    """Matrices, a convolution's kernel, biases, a norm gain and a number."""

    def __init__(self, sizes):
        super().__init__()
        inner, wide, outer = sizes
        self.up = nn.Linear(inner, wide)
        self.norm = nn.LayerNorm(wide)
        self.down = nn.Linear(wide, outer)
        self.kernel = nn.Parameter(torch.randn(wide, 2, 3))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        hidden = torch.tanh(self.up(x)) * self.kernel.sum((1, 2))
        return self.down(self.norm(hidden)) * self.scale


def make_model(sizes=EVEN):
    torch.manual_seed(3)
    return Model(sizes)


def mesh_of(case):
    names = {"fsdp2+tp": ("dp", "tp"), "hsdp": ("replica", "shard")}.get(case.way, ("a", "b"))
    ranks = torch.arange(case.world).view(case.mesh)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names[: len(case.mesh)])


def shard(model, case, mesh=None, original=True):
    """The model sharded in place, or wrapped; ``original`` is FSDP1's ``use_orig_params``."""
    if case.way == "alone":
        return model
    mesh = mesh or mesh_of(case)
    if case.way == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group())
    if case.way in STRATEGIES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NO_SHARD is deprecated
            return FullyShardedDataParallel(
                model,
                device_mesh=mesh,
                sharding_strategy=STRATEGIES[case.way],
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear, nn.LayerNorm}),
                mixed_precision=MixedPrecision(reduce_dtype=torch.float32),
                device_id=torch.device("cpu"),
                use_orig_params=original,
            )
    if case.way in ("tp", "fsdp2+tp"):
        tp = mesh["tp"] if case.way == "fsdp2+tp" else mesh
        # What is not in the plan stays whole, and so do the activations between the two.
        up = ColwiseParallel(output_layouts=Replicate())
        down = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(model, tp, {"up": up, "down": down})
        if case.way == "tp":
            return model
        mesh = mesh["dp"]
    options = {}
    if case.way == "fsdp2-columns":
        options["shard_placement_fn"] = lambda p: Shard(1) if p.ndim == 2 else None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(model, mesh=mesh, mp_policy=policy, **options)


def named(model):
    """Parameters by the names that they had before the model was wrapped."""
    return {
        name.removeprefix("module.").replace("_fsdp_wrapped_module.", ""): p
        for name, p in model.named_parameters()
    }


def local(tensor: Tensor) -> Tensor:
    """The memory of a tensor on this rank."""
    # In this order, because operations on a DTensor take a hundred times as long the first time.
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def placed(parameter: Tensor, memory: Tensor) -> Tensor:
    """Memory of this rank as a tensor that is sharded like a parameter."""
    if not isinstance(parameter, DTensor):
        return memory.view(parameter.shape)
    return DTensor.from_local(
        memory.view(local(parameter).shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@functools.cache
def held(case: Case) -> dict[str, tuple[torch.Size, Tensor]]:
    """Each parameter's whole shape, and the indices in it of the elements in this rank's memory.

    Torch says so itself: the bits of each element of a model are its index, and it is sharded.
    """
    model = make_model(case.sizes)
    if case.way in STRATEGIES:
        model.bfloat16()  # FSDP1 aligns by bytes
    shapes = {name: p.shape for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data.view(RAW[p.itemsize]).copy_(torch.arange(p.numel()).view(p.shape))
    found = {}
    for name, p in named(shard(model, case)).items():
        bits = local(p).reshape(-1).view(RAW[p.itemsize])
        found[name] = shapes[name], bits.long() & (2 ** (8 * p.itemsize) - 1)
    return found
