"""Operations on models: unwrap them, and run them under autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from accelerate.utils import AutocastKwargs
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import torch_bf16
from torch_bf16 import plugin_api

__all__ = [
    "autocast",
    "carry_autocast",
    "is_wrapped",
    "unwrap_model",
]


def unwrap_model(model: nn.Module) -> nn.Module:
    """The user's own module, below DDP, FSDP1 and ``torch.compile``."""
    # The function of the oldest supported Accelerate cannot unwrap a compiled module.
    while True:
        if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
            model = model.module
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model


def is_wrapped(model: nn.Module) -> bool:
    """Whether an Accelerator has prepared this model and put a wrapper around it."""
    # A compiled module shows the marks of the one inside, which may have been prepared bare, in
    # another mode and before it was compiled.
    inner = plugin_api.unwrap_compiled(model)
    return getattr(inner, "_is_accelerate_prepared", False) and unwrap_model(inner) is not inner


def autocast(
    accelerator: Any, compute: str, handler: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """The context in which bf16 weights compute; the user's own settings win."""
    settings = _settings(handler or accelerator.autocast_handler)
    return torch_bf16.arithmetic(accelerator.device.type, compute, **settings)


def carry_autocast(model: nn.Module, accelerator: Any, compute: str) -> None:
    """Let a cast model run under autocast wherever it is called, and return fp32."""
    settings = _settings(accelerator.autocast_handler)
    torch_bf16.carry_autocast(unwrap_model(model), compute=compute, **settings)


def _settings(handler: AutocastKwargs | None) -> dict[str, Any]:
    return {"cache_enabled": False, **(handler.to_kwargs() if handler is not None else {})}
