"""The adapters that peft wants in fp32, as names for ``keep_fp32``."""

from __future__ import annotations

import sys

import torch
from torch import nn

from .cast_modules import cast_recipe

__all__ = ["fp32_adapters"]


def fp32_adapters(model: nn.Module) -> tuple[str, ...]:
    """Names of peft's fp32 adapter weights beside a base loaded in bf16, fp16 or quantised.

    Their fp32 is intended: peft makes them fp32 unless ``autocast_adapter_dtype=False``. If the
    base was loaded in fp32 as well, the whole model is to become bf16, and nothing is kept.
    Accelerate's plugin keeps them; elsewhere, ask for it.

    Args:
        model: a model of peft, or one that contains some; others have none.

    Returns:
        Names of parameters of ``model``.

    Example:
        >>> torch_bf16.fp32_adapters(torch.nn.Linear(4, 4))
        ()
    """
    if "peft" not in sys.modules:
        return ()
    from peft.tuners.tuners_utils import BaseTunerLayer

    names = []
    for prefix, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        if _came_in_fp32(layer.get_base_layer()):
            continue
        for attribute in layer.adapter_layer_names:
            adapters = getattr(layer, attribute, None)
            if isinstance(adapters, (nn.ModuleDict, nn.ParameterDict)):
                named = adapters.named_parameters(f"{prefix}.{attribute}")
                names += [name for name, p in named if _is_plain_fp32(p)]
    return tuple(names)


def _came_in_fp32(module: nn.Module) -> bool:
    return all(
        _is_plain_fp32(parameter) or cast_recipe(owner) is not None
        for owner in module.modules()
        for parameter in owner.parameters(recurse=False)
    )


def _is_plain_fp32(parameter: nn.Parameter) -> bool:
    # torch's own classes, sharded or not; quantised parameters have classes of other libraries.
    return type(parameter).__module__.startswith("torch.") and parameter.dtype == torch.float32
