"""The mode that a process trains in: the names that there are, and ``AcceleratorState``."""

from __future__ import annotations

import os
from typing import Any

from accelerate_bf16.modes import ALIASES, MODES, canonical, canonical_or_refuse
from accelerate_bf16.refusals import refuse_engine
from bf16_autoload import Patches

from .enums import add_member


def add_modes(module: Any, patches: Patches) -> None:
    """Make the modes members of ``PrecisionType``."""
    for mode in MODES:
        add_member(patches, module.PrecisionType, mode)
    for alias, mode in ALIASES.items():
        add_member(patches, module.PrecisionType, alias, module.PrecisionType(mode))


def rename(module: Any, patches: Patches) -> None:
    """Canonicalise the mode of an Accelerator that was made before us, from the environment."""
    state = module.AcceleratorState._shared_state
    if mode := canonical(state.get("_mixed_precision")):
        state["_mixed_precision"] = mode


def init(original: Any) -> Any:
    """Hold our modes under their own names."""

    def __init__(self: Any, mixed_precision: Any = None, *args: Any, **kwargs: Any) -> None:
        first = not self._shared_state
        if first and mixed_precision is None:
            # Accelerate does not validate it.
            value = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
            mixed_precision = canonical_or_refuse(value)
        mode = canonical(mixed_precision)
        if mode is None or not first:
            return original(self, mode or mixed_precision, *args, **kwargs)
        for engine in ("DEEPSPEED", "MEGATRON_LM"):
            if os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true":
                refuse_engine(mode, engine)
        plugin = kwargs.get("fsdp_plugin")
        own = getattr(plugin, "mixed_precision_policy", None)
        # A plugin for FSDP, which is set up here, accepts no name but Accelerate's own.
        original(self, "bf16", *args, **kwargs)
        self._mixed_precision = mode
        if self.distributed_type.value == "FSDP" and plugin is not None and own is None:
            from accelerate_bf16.sharding import policy

            plugin.mixed_precision_policy = policy(getattr(plugin, "fsdp_version", 1))

    return __init__
