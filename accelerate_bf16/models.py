"""Models: below their wrappers, under autocast, and the same on every replica."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from accelerate.utils import AutocastKwargs, convert_outputs_to_fp32
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import torch_bf16

__all__ = ["autocast", "bare", "is_wrapped", "share_masters", "wrap_forward"]


def bare(model: nn.Module) -> nn.Module:
    """The user's own module, below DDP, FSDP1 and ``torch.compile``."""
    # The oldest Accelerate's own function cannot look below a compiled module.
    while True:
        if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
            model = model.module
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model


def is_wrapped(model: nn.Module) -> bool:
    """Whether an Accelerator has prepared this model and put a wrapper around it."""
    return getattr(model, "_is_accelerate_prepared", False) and bare(model) is not model


def autocast(accelerator: Any, handler: AutocastKwargs | None = None) -> torch.autocast:
    """The context in which bf16 weights compute; the user's own settings win."""
    handler = handler or accelerator.autocast_handler
    # Weights are bf16 already: the cache of cast weights would only hold on to memory.
    settings = {"cache_enabled": False, **(handler.to_kwargs() if handler is not None else {})}
    return torch.autocast(accelerator.device.type, dtype=torch.bfloat16, **settings)


def share_masters(model: nn.Module, synced: bool) -> None:
    """Give all replicas the exact weights of the first rank, whose bf16 halves they were sent.

    DDP sends them, and FSDP1 where it was told so: ``synced``, its ``sync_module_states``.
    """
    inner = getattr(model, "_orig_mod", model)  # torch.compile goes around the others
    if isinstance(inner, DistributedDataParallel):
        torch_bf16.sync_masters(inner, group=inner.process_group)
    elif synced and isinstance(inner, FullyShardedDataParallel):
        torch_bf16.sync_masters(inner)


def wrap_forward(model: nn.Module, context: torch.autocast) -> None:
    """Run ``forward`` under ``context`` and return fp32, as Accelerate does for its own bf16 mode.

    ``unwrap_model(keep_fp32_wrapper=False)`` finds the attributes that are set here and takes the
    wrapper off again.
    """
    if "_original_forward" in model.__dict__:
        return
    # Accelerate keeps the bound method here, does not meet it in the chain of __wrapped__ when it
    # unwraps, and takes the user's own decorators off with ours. The function it does meet.
    function = getattr(model.forward, "__func__", None)  # a partial or a closure has none
    original: Any = function or model.forward
    wrapper: Any = convert_outputs_to_fp32(context(original))
    model._original_forward = original
    model.forward = MethodType(wrapper, model) if function else wrapper
