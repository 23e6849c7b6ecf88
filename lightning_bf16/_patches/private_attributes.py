"""Information that Lightning has only in private attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

__all__ = [
    "cast_lottery_tickets",
    "logs_this_step",
    "syncs_module_states",
    "validate_setup",
    "widen_averages",
    "wrapped_module",
]


def syncs_module_states(strategy: Any) -> bool:
    """Whether FSDP1 sends the weights of rank 0 to all ranks as it wraps a module."""
    # The attribute of the Trainer's strategy, and of Fabric's.
    options = getattr(strategy, "kwargs", None) or getattr(strategy, "_fsdp_kwargs", None) or {}
    return bool(options.get("sync_module_states"))


def validate_setup(fabric: Any, module: Module | None, optimizers: Any) -> None:
    """Let Fabric refuse what was set up already, before anything is converted.

    Raises:
        ValueError, RuntimeError: as ``setup`` does, or ``setup_optimizers`` if there is no module.
    """
    if module is None:
        fabric._validate_setup_optimizers(optimizers)
    else:
        fabric._validate_setup(module, optimizers)


def wrapped_module(fabric_module: Any) -> Module:
    """The module that was given to ``fabric.setup``.

    Fabric's own property asks it for its truth, which a compiled module without a length refuses.
    """
    return fabric_module._original_module


def cast_lottery_tickets(trainer: Any) -> None:
    """Cast the original weights that ModelPruning keeps, as their layers were cast.

    The callback puts them in place of the weights unchanged, and an optimizer refuses fp32 ones.
    """
    for callback in trainer.callbacks:
        for ticket in (getattr(callback, "_original_layers", None) or {}).values():
            layer, _ = callback._parameters_to_prune[ticket["names"][0][0]]
            for original, parameter in zip(
                ticket["data"].parameters(), layer.parameters(), strict=True
            ):
                original.data = original.data.to(parameter.dtype)


def widen_averages(trainer: Any) -> None:
    """Make the averages of WeightAveraging and SWA fp32, even if the module was already bf16.

    They are copies of the module from before this fit, which an evaluation, a finder or another fit
    may already have cast; an average in bf16 hardly moves.
    """
    for callback in trainer.callbacks:
        average = getattr(callback, "_average_model", None)
        for parameter in average.parameters() if isinstance(average, Module) else ():
            if parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()


def logs_this_step(trainer: Any) -> bool:
    """Whether metrics that are logged during this batch reach the loggers."""
    return trainer._logger_connector.should_update_logs
