"""What this package replaces in Lightning.

A run without a mode imports none of the core, and none of the modules that need it.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from bf16_autoload import Patches, version_numbers
from lightning_bf16 import _OLDEST
from lightning_bf16.modes import MODES, in_use, overriding_mode

from . import connectors

__all__ = ["REPLACED", "on_import", "patches"]

patches = Patches()
"""Everything that is currently replaced."""

# The attributes in which each connector keeps the requested name and plugin.
_trainer = functools.partial(connectors.choose, "_precision_flag", "_precision_plugin_flag")
_fabric = functools.partial(connectors.choose, "_precision_input", "_precision_instance")

REPLACED: dict[str, dict[str, str | Callable[[Any], Any]]] = {
    "accelerator_connector": {"_AcceleratorConnector._check_and_init_precision": _trainer},
    "connector": {"_Connector._check_and_init_precision": _fabric},
    "deepspeed": {
        "DeepSpeedStrategy._initialize_engine": "deepspeed_strategy.make_engine",
        "DeepSpeedStrategy._setup_model_and_optimizer": "deepspeed_strategy.make_engine",
    },
    "fabric": {
        "Fabric.setup": "fabric_methods.setup",
        "Fabric.setup_module": "fabric_methods.setup_module",
        "Fabric.setup_optimizers": "fabric_methods.setup_optimizers",
        "Fabric.clip_gradients": "fabric_methods.clip_gradients",
        "Fabric.save": "fabric_methods.save",
        "Fabric.load": "fabric_methods.load",
    },
    "trainer": {"Trainer.save_checkpoint": "checkpoints.save_checkpoint"},
    "strategy": {"Strategy.load_model_state_dict": "checkpoints.load_model_state_dict"},
    "weight_averaging": {
        "WeightAveraging.setup": "weight_averaging.setup",
        "WeightAveraging._swap_models": "weight_averaging.swap_models",
    },
}
"""By the last part of a module's name: what is replaced, and the function that wraps it.

One that is given by its name in this folder is imported once a mode is used.
"""


def on_import(module: ModuleType) -> None:
    """Patch one of the host modules that ``bf16_autoload.TARGETS`` lists for this plugin.

    Raises:
        ImportError: the host is too old. ``BF16_MODE`` is then refused when a Trainer is made.
    """
    try:
        _patch(module)
    except (AttributeError, KeyError) as error:
        host = module.__name__.partition(".")[0]
        version = getattr(sys.modules.get(host), "__version__", "")
        if version_numbers(version) >= _OLDEST:
            raise
        needed = ".".join(map(str, _OLDEST))
        why = f"the modes need {host} {needed} or newer, and this is {version or 'older'}"
        for name in ("AcceleratorConnector", "_AcceleratorConnector", "_Connector"):
            if hasattr(vars(module).get(name), "_check_and_init_precision"):
                path = f"{name}._check_and_init_precision"
                patches.replace(module, path, functools.partial(_refusing, why))
        raise ImportError(why) from error


def _refusing(why: str, original: Any) -> Any:
    """Make a connector refuse a mode by name where it would train in another precision."""

    def check(self: Any) -> Any:
        if mode := overriding_mode():
            raise RuntimeError(f"BF16_MODE={mode} was asked for, and {why}")
        return original(self)

    return check


def _once_in_use(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``original``, and what wraps it from when a plugin of ours exists."""

    @functools.cache
    def wrapped() -> Callable[..., Any]:
        return pkgutil.resolve_name(f"{__name__}.{name}")(original)

    return lambda *args, **named: (wrapped() if in_use() else original)(*args, **named)


def _patch(module: ModuleType) -> None:
    name = module.__name__.rpartition(".")[2]
    for path, make in REPLACED[name].items():
        # Fabric's strategy has one of these two methods, the Trainer's has the other.
        if name != "deepspeed" or hasattr(module.DeepSpeedStrategy, path.rpartition(".")[2]):
            if isinstance(make, str):
                make = functools.partial(_once_in_use, make)
            patches.replace(module, path, make)
    if name == "connector":
        # All packages share one object, which every module has imported: extend it in place.
        precisions: Any = vars(module)["_PRECISION_INPUT_STR"]
        if new := [each for each in MODES if each not in precisions.__args__]:
            patches.set(precisions, "__args__", (*precisions.__args__, *new))
