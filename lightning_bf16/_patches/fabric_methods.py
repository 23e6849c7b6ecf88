"""Methods of Fabric, which has no ``connect`` for optimizers and clips without the plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakSet

from torch.nn import Module
from torch.optim import Optimizer

import torch_bf16
from lightning_bf16.deepspeed import DeepSpeedMixin
from lightning_bf16.precision import PrecisionMixin

from .private_attributes import validate_setup

__all__ = ["clip_gradients", "load", "save", "setup", "setup_module", "setup_optimizers"]

_wrapped: WeakSet[Module] = WeakSet()
_optimizers: WeakSet[Optimizer] = WeakSet()
"""Modules and optimizers that were set up apart, in either order."""


def _with_our_plugins(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    """Call ``replacement(original, fabric, plugin, ...)`` with our plugins, else the original."""

    def make(original: Any) -> Any:
        def method(fabric: Any, *args: Any, **options: Any) -> Any:
            plugin = fabric.strategy.precision
            # DeepSpeed's engine gets its optimizer from the strategy.
            if not isinstance(plugin, PrecisionMixin) or isinstance(plugin, DeepSpeedMixin):
                return original(fabric, *args, **options)
            return replacement(partial(original, fabric), fabric, plugin, *args, **options)

        return method

    return make


@_with_our_plugins
def setup(
    original: Any, fabric: Any, plugin: Any, module: Any, *optimizers: Any, **options: Any
) -> Any:
    """Convert the optimizers before Fabric wraps them: its wrapper takes on their class."""
    validate_setup(fabric, module, optimizers)
    bare_module = getattr(module, "_orig_mod", module)
    # Optimizers first, so that they are refused before anything is cast.
    converted = plugin.convert_optimizers(optimizers, bare_module)
    plugin.convert_module(bare_module)
    result = original(module, *optimizers, **options)
    wrapped = (result[0] if optimizers else result)._forward_module
    plugin.sync_masters(wrapped, fabric.strategy)
    plugin.setup_gradients(wrapped, optimizers)
    torch_bf16.follow(bare_module, *optimizers)
    plugin.announce(converted)
    return result


@_with_our_plugins
def setup_module(original: Any, fabric: Any, plugin: Any, *args: Any, **options: Any) -> Any:
    """Remember the wrapped module, so that its gradients can be summed or released."""
    result = original(*args, **options)
    plugin.sync_masters(result._forward_module, fabric.strategy)
    _wrapped.add(result._forward_module)
    plugin.announce(_pair(plugin, [result._forward_module], _optimizers))
    return result


@_with_our_plugins
def setup_optimizers(original: Any, fabric: Any, plugin: Any, *optimizers: Any) -> Any:
    """Convert the optimizers before Fabric wraps them."""
    validate_setup(fabric, None, optimizers)
    converted = plugin.convert_optimizers(optimizers)
    _optimizers.update(filter(torch_bf16.held_optimizers, optimizers))
    _pair(plugin, _wrapped, optimizers)
    plugin.announce(converted)
    return original(*optimizers)


def _pair(plugin: Any, modules: Iterable[Module], optimizers: Iterable[Any]) -> list[Any]:
    """Set up gradients and train modes of modules that have optimizers; returns the optimizers."""
    paired: list[Any] = []
    for module in modules:
        trained = set(module.parameters())
        own = [e for e in optimizers if not trained.isdisjoint(torch_bf16.parameters_of(e))]
        if own:
            plugin.setup_gradients(module, own)
            torch_bf16.follow(module, *own)
            paired += own
    return paired


@_with_our_plugins
def save(
    original: Any, fabric: Any, plugin: Any, path: Any, state: Any, *args: Any, **options: Any
) -> Any:
    """Save the averages of schedule-free optimizers, whatever mode they are in."""
    with torch_bf16.averaged(*state.values()):
        return original(path, state, *args, **options)


@_with_our_plugins
def load(
    original: Any,
    fabric: Any,
    plugin: Any,
    path: Any,
    state: Any = None,
    *args: Any,
    **options: Any,
) -> Any:
    """Put schedule-free optimizers, which were saved in eval mode, into their modules' modes."""
    result = original(path, state, *args, **options)
    for module in (state or {}).values():
        for part in module.modules() if isinstance(module, Module) else ():
            torch_bf16.follow(part)
    return result


@_with_our_plugins
def clip_gradients(
    original: Any,
    fabric: Any,
    plugin: Any,
    module: Any,
    optimizer: Any,
    clip_val: float | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = True,
) -> Any:
    """Clip by the fp32 2-norm of the optimizer's gradients, over all ranks; others are Fabric's."""
    plugin.refuse_released(optimizer)
    if float(norm_type) != 2.0 or max_norm is None or clip_val is not None:
        torch_bf16.refuse_released(plugin.main_params(optimizer))  # by the program itself
        return original(module, optimizer, clip_val, max_norm, norm_type, error_if_nonfinite)
    return torch_bf16.clip_grad_norm_(
        plugin.main_params(optimizer), max_norm, error_if_nonfinite=error_if_nonfinite
    )
