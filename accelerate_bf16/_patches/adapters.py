"""Adapters of peft, which peft makes fp32 each time it loads them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["cast_adapter_dtype"]


def cast_adapter_dtype(original: Callable[..., None]) -> Callable[..., None]:
    """Leave adapters that were cast to bf16 as they are.

    peft would replace them with new fp32 parameters, and those that an optimizer has would never
    get a gradient again. A new adapter becomes fp32 as always, and bf16 when its model is
    prepared.
    """

    def _cast_adapter_dtype(tuner: Any, *args: Any, **kwargs: Any) -> None:
        cast = [(*each, each[-1].data) for each in _cast_to_bf16(tuner)]
        original(tuner, *args, **kwargs)
        # Put back afterwards: which parameters peft casts, and how, differs between its versions.
        for owner, name, parameter, data in cast:
            if parameter.dtype != data.dtype:
                parameter.data = data
            owner._parameters[name] = parameter

    return _cast_adapter_dtype


def _cast_to_bf16(module: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield the parameters that were cast, as (module, name in the module, parameter)."""
    if "torch_bf16" not in sys.modules:  # nothing was cast yet
        return
    import torch

    from torch_bf16 import plugin_api

    for owner in module.modules():
        if plugin_api.cast_recipe(owner) is not None:
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.dtype == torch.bfloat16:
                    yield owner, name, parameter
