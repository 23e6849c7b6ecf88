"""The parts that a model of transformers or peft wants in fp32, as names for ``keep_fp32``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import torch
from torch import nn

import torch_bf16

__all__ = ["fp32_adapters", "fp32_parts"]


def fp32_parts(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules and parameters that a model declares to need fp32 even beside bf16.

    Models of transformers declare them in ``_keep_in_fp32_modules_strict``. The weaker
    ``_keep_in_fp32_modules`` concerns only fp16, in transformers and here. A module that has only
    such parameters is listed itself, so that it computes in fp32 too.
    """
    names: set[str] = set()
    for prefix, module in model.named_modules():
        declared = getattr(module, "_keep_in_fp32_modules_strict", None)
        if not isinstance(declared, (list, tuple, set)) or not declared:
            continue
        # A star stands for one part of a name, as when transformers loads weights.
        alternatives = "|".join(
            re.escape(each).replace(r"\*", r"[^.]*") for each in sorted(declared)
        )
        pattern = re.compile(rf"(^|\.)({alternatives})(\.|$)")
        start = f"{prefix}." if prefix else ""
        names |= {start + name for name, _ in module.named_parameters() if pattern.search(name)}
    return tuple(_by_module(model, names))


def fp32_adapters(model: nn.Module) -> tuple[str, ...]:
    """Names of peft's fp32 adapter weights beside a base loaded in bf16, fp16 or quantised.

    Their fp32 is intended: peft makes them fp32 unless ``autocast_adapter_dtype=False``. If the
    base was loaded in fp32 as well, the whole model is to become bf16, and nothing is kept.
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
        _is_plain_fp32(parameter) or torch_bf16.cast_recipe(owner) is not None
        for owner in module.modules()
        for parameter in owner.parameters(recurse=False)
    )


def _is_plain_fp32(parameter: nn.Parameter) -> bool:
    # torch's own classes, sharded or not; quantised parameters have classes of other libraries.
    return type(parameter).__module__.startswith("torch.") and parameter.dtype == torch.float32


def _by_module(model: nn.Module, names: set[str]) -> Iterator[str]:
    """Replace names of parameters with their module's name if all of its parameters are kept."""
    for prefix, module in model.named_modules():
        inside = {name for name, _ in module.named_parameters(prefix)}
        if prefix and inside and inside <= names:
            names -= inside
            yield prefix
    yield from sorted(names)
