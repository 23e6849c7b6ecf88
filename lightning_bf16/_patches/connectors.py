"""Names of recipes become precisions of Trainer and Fabric."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch_bf16

from .replacements import replacements

__all__ = ["on_import"]

_XLA = "the fused optimizer step does not run on XLA devices"
_REFUSED = {
    "DeepSpeedStrategy": "DeepSpeed's engine owns the optimizer and its own fp32 masters",
    "SingleDeviceXLAStrategy": _XLA,
    "XLAStrategy": _XLA,
    "XLAFSDPStrategy": _XLA,
}


# Where each connector keeps the name and the plugin that were asked for.
_CONNECTORS = {
    "_AcceleratorConnector": ("_precision_flag", "_precision_plugin_flag"),
    "_Connector": ("_precision_input", "_precision_instance"),
}


def on_import(module: ModuleType) -> None:
    """Patch one of the host modules that ``bf16_autoload.TARGETS`` lists for this plugin."""
    # One object in all packages, and every module has imported it: it grows where it is.
    replacements.replace(module._PRECISION_INPUT_STR, "__args__", _with_recipes)
    # lightning.pytorch, lightning.fabric, pytorch_lightning or lightning_fabric.
    parts = module.__name__.split(".")
    family = ".".join(parts[: 2 if parts[0] == "lightning" else 1])
    for name, attributes in _CONNECTORS.items():
        if name in vars(module):
            make = functools.partial(_precision, family, *attributes)
            replacements.wrap(vars(module)[name], "_check_and_init_precision", make)


def _with_recipes(names: tuple[str, ...]) -> tuple[str, ...]:
    return (*names, *(name for name in torch_bf16.RECIPES if name not in names))


def _precision(
    family: str, flag: str, instance: str, connector: Any, original: Callable[[], Any]
) -> Any:
    """Our plugin where its name or it itself was given, else what Lightning makes."""
    # Only here, so that a program that uses another precision pays for nothing.
    from lightning_bf16.precision import PrecisionBody

    name, given = getattr(connector, flag), getattr(connector, instance)
    named = given is None and isinstance(name, str) and name in torch_bf16.RECIPES
    if not named and not isinstance(given, PrecisionBody):
        return original()
    own = importlib.import_module(f"lightning_bf16.{family.rpartition('.')[2]}").BF16Precision
    plugin: Any = own(name) if named else given
    for kind in type(connector.strategy).__mro__:
        if kind.__name__ in _REFUSED:
            raise ValueError(
                f"precision {plugin.mode!r} cannot be used with {type(connector.strategy).__name__}"
                f": {_REFUSED[kind.__name__]}. Use strategy='ddp', FSDP2 or tensor parallelism "
                "through ModelParallelStrategy, or precision='bf16-true'"
            )
    if not isinstance(plugin, own):
        # Fabric, say, takes a Trainer's plugin and never calls its connect.
        kind = type(plugin)
        raise TypeError(
            f"{kind.__module__}.{kind.__name__} cannot be used in {family}, which calls other "
            f"methods of it. Use {own.__module__}.BF16Precision with the same options"
        )
    return plugin
