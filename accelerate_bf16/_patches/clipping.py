"""Replacements for ``Accelerator.clip_grad_norm_`` and ``clip_grad_value_``."""

from __future__ import annotations

import math
import warnings
from typing import Any

from .accelerator import without_deepspeed

__all__ = ["clip_grad_norm_", "clip_grad_value_"]

_TO_CLIP = (
    "Clip by BF16_RELEASE_MAX_NORM=1.0 or BF16RecipeKwargs(release_gradients=True, "
    "release_max_norm=1.0), each parameter alone or by the last step's norm, and switch off the "
    "script's own clipping: --max_grad_norm 0 in many"
)


@without_deepspeed
def clip_grad_norm_(
    original: Any, accelerator: Any, mode: str, parameters: Any, max_norm: Any, norm_type: Any = 2
) -> Any:
    """Clip by the fp32 2-norm, and leave the scaling to the step if possible."""
    if norm_type != 2:
        return original(accelerator, _to_write(accelerator, parameters), max_norm, norm_type)
    import torch_bf16
    from accelerate_bf16.optimizers import converted_optimizers
    from torch_bf16 import plugin_api

    parameters = _listed(parameters)
    optimizers = converted_optimizers(accelerator._optimizers)
    if max_norm == math.inf:
        return _norm_alone(parameters, optimizers)
    plugin_api.refuse_released(parameters, _TO_CLIP)
    if not accelerator.sync_gradients:
        # A partial sum, different on each rank: only the norm of the whole sum may reach the step.
        _warn_of_a_part(accelerator, mode)
        return torch_bf16.total_norm(parameters, optimizers=optimizers)
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
    from torch_bf16 import plugin_api

    parameters = _listed(parameters)
    plugin_api.refuse_released(parameters, _TO_CLIP)
    torch_bf16.scale_gradients(accelerator._optimizers)
    return parameters


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if hasattr(parameters, "grad") else list(parameters)


def _warn_of_a_part(accelerator: Any, mode: str) -> None:
    """Say once that only a whole sum is clipped; scripts that ask sync_gradients never see it."""
    if not vars(accelerator).get("_bf16_warned_of_a_part"):
        accelerator._bf16_warned_of_a_part = True
        warnings.warn(
            "clip_grad_norm_ was called in a pass whose gradients are only a part of a sum "
            f"(accelerator.sync_gradients is False): mixed_precision={mode!r} clips nothing there, "
            "and the whole sum in the pass that takes the step. Call it only if "
            "accelerator.sync_gradients, which clips the whole sum in every mode",
            stacklevel=4,
        )


def _norm_alone(parameters: Any, optimizers: Any) -> Any:
    """The norm for the logs of a Trainer that does not clip; NaN for released gradients."""
    import torch

    import torch_bf16

    try:
        return torch_bf16.total_norm(parameters, optimizers=optimizers)
    except NotImplementedError:
        return torch.full((), math.nan)
