"""Methods of Fabric, which has no ``connect`` for optimizers and clips without the plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

import torch_bf16
from lightning_bf16 import precision
from lightning_bf16.deepspeed import DeepSpeedMixin
from torch_bf16 import plugin_api

from .private_attributes import validate_setup, wrapped_module

__all__ = ["clip_gradients", "load", "save", "setup", "setup_module", "setup_optimizers"]


class _SetUp:
    """What a plugin's Fabric has set up, together or apart, in whatever order."""

    def __init__(self) -> None:
        # The user's own module by the one that is called; by identity, as some compare elements.
        self.modules: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.optimizers: WeakSet[Optimizer] = WeakSet()


_set_up: WeakKeyDictionary[Any, _SetUp] = WeakKeyDictionary()


def _with_our_plugins(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    """Call ``replacement(original, fabric, plugin, ...)`` with our plugins, else the original."""

    def make(original: Any) -> Any:
        def method(fabric: Any, *args: Any, **options: Any) -> Any:
            plugin = fabric.strategy.precision
            ours = isinstance(plugin, precision.PrecisionMixin)
            # DeepSpeed's engine gets its optimizer from the strategy.
            if not ours or isinstance(plugin, DeepSpeedMixin):
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
    # Before Fabric casts the module, so that they are refused while nothing is cast.
    plugin.convert_optimizers(optimizers, getattr(module, "_orig_mod", module))
    result = original(module, *optimizers, **options)
    _add_module(fabric, plugin, result[0] if optimizers else result, optimizers)
    return result


@_with_our_plugins
def setup_module(original: Any, fabric: Any, plugin: Any, *args: Any, **options: Any) -> Any:
    """Let optimizers that were set up before sum or release the module's gradients."""
    result = original(*args, **options)
    _add_module(fabric, plugin, result)
    return result


@_with_our_plugins
def setup_optimizers(original: Any, fabric: Any, plugin: Any, *optimizers: Any) -> Any:
    """Convert the optimizers before Fabric wraps them."""
    validate_setup(fabric, None, optimizers)
    plugin.convert_optimizers(optimizers)
    known = _set_up.setdefault(plugin, _SetUp())
    known.optimizers.update(filter(plugin_api.held_optimizers, optimizers))
    for wrapped, bare in [*known.modules.items()]:
        if own := _trained(wrapped, optimizers):
            _connect(plugin, wrapped, bare(), own)
    plugin.announce(optimizers)
    return original(*optimizers)


def _add_module(fabric: Any, plugin: Any, module: Any, optimizers: Iterable[Any] = ()) -> None:
    """Set up the gradients of a module that Fabric has wrapped, and of its optimizers so far.

    ``optimizers``, set up with the module, take over from earlier ones of the same parameters.
    """
    wrapped, given = module._forward_module, wrapped_module(module)
    bare = getattr(given, "_orig_mod", given)
    plugin.sync_masters(wrapped, fabric.strategy)
    known = _set_up.setdefault(plugin, _SetUp())
    known.modules[wrapped] = ref(bare)
    taken = {*chain(*map(plugin_api.parameters_of, optimizers))}
    earlier = [e for e in known.optimizers if taken.isdisjoint(plugin_api.parameters_of(e))]
    known.optimizers.update(filter(plugin_api.held_optimizers, optimizers))
    own = [*optimizers, *_trained(wrapped, earlier)]
    _connect(plugin, wrapped, bare, own)
    plugin.announce(own)


def _trained(module: Module, optimizers: Iterable[Any]) -> list[Any]:
    """The optimizers that train a parameter of a module."""
    own = set(plugin_api.parameters_in(module))
    return [e for e in optimizers if not own.isdisjoint(plugin_api.parameters_of(e))]


def _connect(plugin: Any, wrapped: Module, bare: Module | None, optimizers: list[Any]) -> None:
    """Set up the gradients and the train modes of a module and its optimizers."""
    plugin.setup_gradients(wrapped, optimizers)
    torch_bf16.follow(wrapped if bare is None else bare, *optimizers)


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
        plugin_api.refuse_released(plugin.main_params(optimizer))  # by the program itself
        return original(module, optimizer, clip_val, max_norm, norm_type, error_if_nonfinite)
    return torch_bf16.clip_grad_norm_(
        plugin.main_params(optimizer), max_norm, error_if_nonfinite=error_if_nonfinite
    )
