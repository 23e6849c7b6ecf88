"""Models: below their wrappers, under autocast, and the same on every replica."""

from __future__ import annotations

import torch
from accelerate.utils import AutocastKwargs
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import torch_bf16

__all__ = ["autocast", "bare", "is_wrapped", "share_masters"]


def bare(model: nn.Module) -> nn.Module:
    """The user's own module, below DDP, FSDP1 and ``torch.compile``."""
    # The oldest Accelerate's own function cannot look below a compiled module.
    while (inner := _below(model)) is not None:
        model = inner
    return model


def is_wrapped(model: nn.Module) -> bool:
    """Whether an Accelerator has prepared this model and wrapped it, as :func:`bare` knows it."""
    return getattr(model, "_is_accelerate_prepared", False) and bare(model) is not model


def autocast(device_type: str, handler: AutocastKwargs | None = None) -> torch.autocast:
    """The context in which bf16 weights compute.

    Weights are bf16 already, so the cache of cast weights would only hold on to memory.

    Args:
        device_type: for example ``"cuda"``.
        handler: the user's settings, which win.

    Example:
        >>> with autocast("cpu"):
        ...     y = model(x)
    """
    settings = {"cache_enabled": False, **(handler.to_kwargs() if handler is not None else {})}
    return torch.autocast(device_type, dtype=torch.bfloat16, **settings)


def share_masters(model: nn.Module, synced: bool = False) -> None:
    """Give all replicas the exact weights of the first rank, whose bf16 halves they were sent.

    Args:
        model: as ``prepare`` returns it; nothing happens to one without DDP or FSDP1.
        synced: whether FSDP1 was told to send them (``sync_module_states``).
    """
    inner = getattr(model, "_orig_mod", model)  # torch.compile goes around the others
    if isinstance(inner, DistributedDataParallel):
        torch_bf16.sync_masters(inner, group=inner.process_group)
    elif synced and isinstance(inner, FullyShardedDataParallel):
        torch_bf16.sync_masters(inner)


def _below(model: nn.Module) -> nn.Module | None:
    if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
        return model.module
    return getattr(model, "_orig_mod", None)
