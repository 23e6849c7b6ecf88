"""DeepSpeed's ZeRO beside plain training: what each rank of ``ranks`` runs.

A process that has had an engine cannot have one in another group, so callers close it afterwards.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torch_bf16

LR = 1e-4


def model() -> nn.Module:
    """Matrices and vectors, of which one is cut in the middle and one is smaller than the ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 32), nn.LayerNorm(32), nn.Linear(32, 40), nn.GELU(), nn.Linear(40, 1)
    )


def batch(step: int, rank: int) -> torch.Tensor:
    """The inputs of a rank, bf16 ``[8, 24]``."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 24, generator=generator).bfloat16()


def start() -> Any:
    """DeepSpeed, in the group of this process."""
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
    }
    import deepspeed

    # Else its first import compiles a transport for CPUs, which takes a minute and a compiler.
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    return deepspeed


def config(stage: int, **zero: Any) -> dict[str, Any]:
    """A configuration as a user writes it."""
    return {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": True},
    }


def optimizer_of(module: nn.Module, recipe: Any, lr: float = LR) -> Any:
    optimizer = torch_bf16.AdamW(module.parameters(), recipe=recipe, lr=lr)
    torch_bf16.separate_vectors(optimizer)
    return optimizer


def engine_of(settings: dict[str, Any], recipe: Any = "bf16-stochastic", module: Any = None) -> Any:
    """An attached engine."""
    deepspeed = start()
    module = module or model()
    made = optimizer_of(module, recipe)
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=made, config=torch_bf16.deepspeed_config(settings)
    )
    torch_bf16.attach(engine)
    return engine


def train(engine: Any, steps: range, *, alike: bool = False) -> None:
    """Some steps.

    Args:
        engine: mutated.
        steps: their numbers.
        alike: whether all ranks have the same batches.
    """
    for step in steps:
        loss = engine(batch(step, 0 if alike else dist.get_rank())).square().mean()
        engine.backward(loss)
        engine.step()


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Whole weights, on every rank."""
    deepspeed = start()
    found = {}
    for name, each in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([each]):
            found[name] = each.detach().clone()
    return found


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of all bits."""
    joined = b"".join(
        each.contiguous().view(torch.int16).numpy().tobytes() for _, each in sorted(tensors.items())
    )
    return hashlib.sha256(joined).hexdigest()[:12]


def plain(
    steps: range,
    ranks: int,
    recipe: Any = "bf16-stochastic",
    initial: dict[str, torch.Tensor] | None = None,
) -> str:
    """Bits of the weights that one process ends with, without DeepSpeed."""
    module = model().bfloat16()
    module.load_state_dict(initial or {}, strict=bool(initial))
    optimizer = torch_bf16.AdamW(module.named_parameters(), recipe=recipe, lr=LR)
    for step in steps:
        sums: list[torch.Tensor] = []
        for rank in range(ranks):
            module.zero_grad()
            module(batch(step, rank)).square().mean().backward()
            scaled = [p.grad / ranks for p in module.parameters()]
            sums = [a + b for a, b in zip(sums, scaled, strict=True)] if sums else scaled
        for p, grad in zip(module.parameters(), sums, strict=True):
            p.grad = grad
        optimizer.step()
    return digest(dict(module.named_parameters()))
