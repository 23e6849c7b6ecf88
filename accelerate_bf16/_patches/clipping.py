"""Replacements for ``Accelerator.clip_grad_norm_`` and ``clip_grad_value_``."""

from __future__ import annotations

import math
from typing import Any

from .accelerator import without_deepspeed

__all__ = ["clip_grad_norm_", "clip_grad_value_"]


@without_deepspeed
def clip_grad_norm_(
    original: Any, accelerator: Any, mode: str, parameters: Any, max_norm: Any, norm_type: Any = 2
) -> Any:
    """Clip by the fp32 norm, and leave the scaling to the step if possible."""
    if norm_type != 2:
        return original(accelerator, _to_write(accelerator, parameters), max_norm, norm_type)
    import torch_bf16
    from accelerate_bf16.optimizers import converted_optimizers

    if max_norm == math.inf:
        return _norm_alone(parameters)
    if not accelerator.sync_gradients:
        # A partial sum, different on each rank: only the norm of the whole sum may reach the step.
        return torch_bf16.total_norm(parameters)
    optimizers = converted_optimizers(accelerator._optimizers)
    return torch_bf16.clip_next_step(optimizers, max_norm, parameters=parameters)


@without_deepspeed
def clip_grad_value_(
    original: Any, accelerator: Any, mode: str, parameters: Any, clip_value: Any
) -> Any:
    """Clip what an earlier clip by the norm has left, and refuse gradients that were released."""
    return original(accelerator, _to_write(accelerator, parameters), clip_value)


def _to_write(accelerator: Any, parameters: Any) -> list[Any]:
    """Parameters whose gradients are about to be written: not released, and scaled by now."""
    import torch_bf16

    parameters = [parameters] if hasattr(parameters, "grad") else list(parameters)
    torch_bf16.refuse_released(parameters)
    torch_bf16.scale_gradients(accelerator._optimizers)
    return parameters


def _norm_alone(parameters: Any) -> Any:
    """The norm for the logs of a Trainer that does not clip; NaN for released gradients."""
    import torch

    import torch_bf16

    try:
        return torch_bf16.total_norm(parameters)
    except NotImplementedError:
        return torch.full((), math.nan)
