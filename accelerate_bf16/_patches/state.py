"""The mode that a process trains in: its names in Accelerate's enum, and ``AcceleratorState``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate_bf16.modes import (
    LAUNCHER_VARIABLE,
    MODE_VARIABLE,
    MODES,
    ModeName,
    canonical,
    environment_mode,
    overriding_mode,
)
from accelerate_bf16.refusals import refuse_engine, refuse_scripts_mode
from accelerate_bf16.report import show
from bf16_autoload import Patches

from .deepspeed import complete_configs
from .enums import add_member
from .properties import replace_property

__all__ = ["add_mixed_precision", "add_modes", "creating", "init"]


def add_modes(module: Any, patches: Patches) -> None:
    """Make the modes members of ``PrecisionType``."""
    for mode in MODES:
        add_member(patches, module.PrecisionType, mode)


_creating = False
"""Whether an Accelerator is being made, which sets up autocast of its own for "bf16"."""


@contextmanager
def creating() -> Iterator[None]:
    """A context in which an Accelerator is made: our modes do not equal "bf16" there."""
    global _creating
    before, _creating = _creating, True
    try:
        yield
    finally:
        _creating = before


def add_mixed_precision(module: Any, patches: Patches) -> None:
    """Let the mode's name equal "bf16" when scripts compare it, until all is put back.

    An Accelerator may have been made before our import: its mode gets its own name, too.
    """
    state = module.AcceleratorState._shared_state
    if mode := canonical(state.get("_mixed_precision")):
        state["_mixed_precision"] = mode

    def make(stock: Any) -> Any:
        def mixed_precision(self: Any) -> Any:
            name = stock(self)
            return ModeName(name) if canonical(name) and not _creating else name

        return mixed_precision

    replace_property(patches, module.AcceleratorState, "mixed_precision", make)


def _resolve(script_mode: str) -> tuple[str, str | None]:
    """The mode that applies if a script names one itself, and the line that says so."""
    mode, launcher_mode = overriding_mode(), canonical(os.environ.get(LAUNCHER_VARIABLE))
    if mode is not None and script_mode != mode:
        refuse_scripts_mode(mode, script_mode)
        line = f"mixed_precision={script_mode!r} in the script becomes {mode!r}: "
        return mode, f"{line}{MODE_VARIABLE}={mode}"
    if mode is None and launcher_mode and canonical(script_mode) is None:
        return script_mode, (
            f"mixed_precision={script_mode!r} in the script wins over "
            f"{LAUNCHER_VARIABLE}={launcher_mode}: this trains in {script_mode!r}. "
            f"{MODE_VARIABLE}={launcher_mode}, which accelerate launch sets, means it even then"
        )
    return script_mode, None


def init(original: Any) -> Any:
    """Hold our modes under their own names."""

    def __init__(self: Any, mixed_precision: Any = None, *args: Any, **kwargs: Any) -> None:
        first, line = not self._shared_state, None
        if mixed_precision is not None:
            mixed_precision, line = _resolve(canonical(mixed_precision) or str(mixed_precision))
        elif first:
            mixed_precision = environment_mode()  # which Accelerate does not validate
        mode = canonical(mixed_precision)
        if mode is None or not first:
            original(self, mixed_precision, *args, **kwargs)
            if first and line and self.is_main_process:
                show(line)
            return
        if os.environ.get("ACCELERATE_USE_MEGATRON_LM", "false").lower() == "true":
            refuse_engine(mode, "MEGATRON_LM")
        complete_configs(kwargs.get("deepspeed_plugin"))
        plugin = kwargs.get("fsdp_plugin")
        own_policy = getattr(plugin, "mixed_precision_policy", None)
        # The plugin for FSDP, which is set up here, accepts only Accelerate's own names.
        original(self, "bf16", *args, **kwargs)
        self._mixed_precision = mode
        if line and self.is_main_process:
            show(line)
        if self.distributed_type.value == "FSDP" and plugin is not None and own_policy is None:
            from accelerate_bf16.sharding import policy

            plugin.mixed_precision_policy = policy(getattr(plugin, "fsdp_version", 1))

    return __init__
