"""fp32 weights that are loaded into a model which is bf16 already.

``load_state_dict`` copies them into the bf16 parameters. The bits that this drops are remembered,
as ``cast_model`` does, so that an exact master starts from the fp32 weights in either order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_bf16.torch_patches import Replacement

from . import remainders
from .cast_modules import stored_by

__all__ = ["watch_loading"]


def watch_loading() -> None:
    """Let cast modules remember the bits that bf16 drops from the fp32 weights that they load.

    For the whole process.
    """
    _LOADING.apply()


def _remembering(original: Any) -> Any:
    def load_from_state_dict(
        self: nn.Module,
        state_dict: MutableMapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        faults = missing_keys, unexpected_keys, error_msgs
        recipe = stored_by(self)
        if recipe is None or local_metadata.get("assign_to_params_buffers"):
            original(self, state_dict, prefix, local_metadata, strict, *faults)
            return
        dropped_from, given, errors = {}, {}, len(error_msgs)

        def split(*_args: Any) -> None:
            for key, parameter in _fp32_weights(self, state_dict, prefix):
                # Rounded here: torch rounds ties differently, and their remainders would not fit.
                given[key] = state_dict[key]
                state_dict[key], dropped = remainders.split(given[key].detach(), recipe)
                if dropped is not None:
                    dropped_from[id(parameter)] = dropped

        # The last of the hooks: others rename, permute and scale what is loaded. Scripted modules
        # have a method that refuses.
        last = nn.Module._register_load_state_dict_pre_hook(self, split)
        try:
            original(self, state_dict, prefix, local_metadata, strict, *faults)
        finally:
            last.remove()
            # It may be the caller's own, and be loaded into another model.
            state_dict.update(given)
        if dropped_from and len(error_msgs) == errors:
            remainders.remember(self, dropped_from)

    return load_from_state_dict


_LOADING = Replacement("load_from_state_dict", nn.Module, "_load_from_state_dict", _remembering)


def _fp32_weights(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Tensor]]:
    """The keys of fp32 weights, each with the module's own bf16 parameter that will take it."""
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if (
            parameter is not None
            and isinstance(value, Tensor)
            and (parameter.dtype, value.dtype) == (torch.bfloat16, torch.float32)
            and parameter.shape == value.shape
            and not parameter.is_meta
            and getattr(parameter, "placements", None) == getattr(value, "placements", None)
        ):
            yield prefix + name, parameter
