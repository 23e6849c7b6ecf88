"""Fabric has no ``connect`` for optimizers, and clips past the precision plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch.nn import Module

import torch_bf16
from lightning_bf16.precision import PrecisionBody

from .private_attributes import syncs_module_states
from .replacements import replacements

__all__ = ["patch_fabric"]

_wrapped: WeakSet[Module] = WeakSet()
"""Modules that were set up on their own; their optimizers come later."""


def patch_fabric(fabric: type) -> None:
    """Let the methods of a ``Fabric`` class do for our plugins what it has no hook for.

    Called where the plugin's class is defined, which spawned processes import as they unpickle a
    Fabric; they make none.
    """
    for method in (setup, setup_module, setup_optimizers, clip_gradients):
        replacements.wrap(fabric, method.__name__, method)


def setup(
    fabric: Any, original: Callable[..., Any], module: Any, *optimizers: Any, **options: Any
) -> Any:
    """Convert the optimizers before Fabric wraps them: its wrapper takes their class over."""
    plugin = fabric.strategy.precision
    if not isinstance(plugin, PrecisionBody):
        return original(module, *optimizers, **options)
    plugin.convert_module(getattr(module, "_orig_mod", module))
    converted = plugin.convert_optimizers(optimizers)
    result = original(module, *optimizers, **options)
    wrapped = (result[0] if optimizers else result)._forward_module
    plugin.sync_replicas(wrapped, syncs_module_states(fabric.strategy))
    plugin.attach(wrapped, optimizers)
    plugin.announce(converted)
    return result


def setup_module(fabric: Any, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Remember the wrapped module, which sums or releases gradients."""
    result, plugin = original(*args, **options), fabric.strategy.precision
    if isinstance(plugin, PrecisionBody):
        plugin.sync_replicas(result._forward_module, syncs_module_states(fabric.strategy))
        _wrapped.add(result._forward_module)
    return result


def setup_optimizers(fabric: Any, original: Callable[..., Any], *optimizers: Any) -> Any:
    """Convert the optimizers before Fabric wraps them."""
    plugin = fabric.strategy.precision
    if isinstance(plugin, PrecisionBody):
        converted = plugin.convert_optimizers(optimizers)
        for optimizer in optimizers:
            groups = getattr(optimizer, "param_groups", ())
            trained = {p for group in groups for p in group["params"]}
            for module in _wrapped:
                if not trained.isdisjoint(module.parameters()):
                    plugin.attach(module, [optimizer])
        plugin.announce(converted)
    return original(*optimizers)


def clip_gradients(
    fabric: Any,
    original: Callable[..., Any],
    module: Any,
    optimizer: Any,
    clip_val: float | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = True,
) -> Any:
    """Clip by the fp32 norm of the optimizer's gradients, over all ranks."""
    plugin = fabric.strategy.precision
    ours = isinstance(plugin, PrecisionBody) and float(norm_type) == 2.0
    if not ours or max_norm is None or clip_val is not None:
        return original(module, optimizer, clip_val, max_norm, norm_type, error_if_nonfinite)
    return torch_bf16.clip_grad_norm_(
        plugin.main_params(optimizer), max_norm, error_if_nonfinite=error_if_nonfinite
    )
