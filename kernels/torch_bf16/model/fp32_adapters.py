"""The adapters that peft wants in fp32."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from . import cast_modules

__all__ = ["fp32_adapters"]


def fp32_adapters(model: nn.Module) -> list[nn.Parameter]:
    """peft's fp32 adapter weights beside a base loaded in bf16, fp16 or quantised.

    Their fp32 is intended: peft makes them fp32 unless ``autocast_adapter_dtype=False``, and
    :func:`cast_model` leaves them so. If the base was loaded in fp32 as well, the whole model is to
    become bf16, and the list is empty.
    """
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    layers: list[Any] = [
        each for each in model.modules() if peft and isinstance(each, peft.BaseTunerLayer)
    ]
    found: list[nn.Parameter] = []
    for layer in layers:
        if _came_in_fp32(layer.get_base_layer()):
            continue
        for attribute in layer.adapter_layer_names:
            adapters = getattr(layer, attribute, None)
            if isinstance(adapters, (nn.ModuleDict, nn.ParameterDict)):
                found += [each for each in adapters.parameters() if _is_plain_fp32(each)]
    return found


def _came_in_fp32(module: nn.Module) -> bool:
    return all(
        _is_plain_fp32(parameter) or cast_modules.cast_recipe(owner) is not None
        for owner in module.modules()
        for parameter in owner.parameters(recurse=False)
    )


def _is_plain_fp32(parameter: nn.Parameter) -> bool:
    # torch's own classes, sharded or not; quantised parameters have classes of other libraries.
    return type(parameter).__module__.startswith("torch.") and parameter.dtype == torch.float32
