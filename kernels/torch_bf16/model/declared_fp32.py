"""The parts of a model that it declares itself to need fp32, in the words of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from torch_bf16.sharding import without_wrappers

__all__ = ["declared_fp32"]


def declared_fp32(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules and parameters that a model declares to need fp32 even beside bf16.

    Models of transformers declare them in ``_keep_in_fp32_modules_strict``: routers of experts, for
    example. The weaker ``_keep_in_fp32_modules`` concerns only fp16, in transformers and here. A
    module that has only such parameters is listed itself, so that it computes in fp32 too.
    """
    named = [(without_wrappers(name), module) for name, module in model.named_modules()]
    names: set[str] = set()
    for prefix, module in named:
        declared = getattr(module, "_keep_in_fp32_modules_strict", None)
        if not isinstance(declared, (list, tuple, set)) or not declared:
            continue
        # A star stands for one part of a name, as when transformers loads weights.
        alternatives = "|".join(
            re.escape(each).replace(r"\*", r"[^.]*") for each in sorted(declared)
        )
        pattern = re.compile(rf"(^|\.)({alternatives})(\.|$)")
        names |= {_join(prefix, name) for name in _parameters(module) if pattern.search(name)}
    return tuple(_by_module(named, names)) if names else ()


def _by_module(named: list[tuple[str, nn.Module]], names: set[str]) -> Iterator[str]:
    """Replace names of parameters with their module's name if all of its parameters are kept."""
    for prefix, module in named:
        inside = {_join(prefix, name) for name in _parameters(module)}
        if prefix and inside and inside <= names:
            names -= inside
            yield prefix
    yield from sorted(names)


def _parameters(module: nn.Module) -> list[str]:
    return [without_wrappers(name) for name, _ in module.named_parameters()]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
