"""The zero-import hook: what torch calls at the end of ``import torch``.

`autoload` is the entry point ``bf16`` of the group ``torch.backends``. It puts one finder in front
of ``sys.meta_path`` that waits for a handful of modules of Lightning and Accelerate. When one of
them has been imported, and before anybody else sees it, the plugin of that host gets to add its
precision names::

    importlib.import_module(plugin).on_import(host_module)

Nothing of ours is imported until then. torch is half-initialised while `autoload` runs, and an
exception there would make ``import torch`` fail for every program of the environment, so this file
imports the standard library only, catches everything, and is a module of its own: a submodule of a
package would run that package's ``__init__``.

``BF16_AUTOLOAD=0`` turns it off; ``import lightning_bf16`` and ``import accelerate_bf16`` work
without it. One thing is done even then: where ``ACCELERATE_MIXED_PRECISION`` names a mode of ours
and nobody imports ``accelerate_bf16``, ``Accelerator.prepare`` raises, because Accelerate does not
validate that variable and would train in fp32 under our name.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["TARGETS", "autoload", "forget", "watch"]

_LIGHTNING = "lightning_bf16._patches"
_ACCELERATE = "accelerate_bf16._patches"

TARGETS: dict[str, str] = {
    "lightning.fabric.plugins.precision.precision": _LIGHTNING,
    "lightning.fabric.connector": _LIGHTNING,
    "lightning.pytorch.trainer.connectors.accelerator_connector": _LIGHTNING,
    "lightning_fabric.plugins.precision.precision": _LIGHTNING,
    "lightning_fabric.connector": _LIGHTNING,
    "pytorch_lightning.trainer.connectors.accelerator_connector": _LIGHTNING,
    "accelerate.accelerator": _ACCELERATE,
    "accelerate.commands.config.config_utils": _ACCELERATE,
    "accelerate.commands.config.default": _ACCELERATE,
    "accelerate.commands.test": _ACCELERATE,
    "accelerate.commands.utils": _ACCELERATE,
    "accelerate.launchers": _ACCELERATE,
    "accelerate.state": _ACCELERATE,
    "accelerate.utils.dataclasses": _ACCELERATE,
    "accelerate.utils.fsdp_utils": _ACCELERATE,
    "transformers.trainer": _ACCELERATE,
    "transformers.trainer_optimizer": _ACCELERATE,
    "transformers.training_args": _ACCELERATE,
}
"""Module of a host -> module of ours whose ``on_import(host_module)`` runs right after it."""

_OFF = ("0", "false", "no", "off")
_OURS = ("bf16-", "true-bf16-")
_off_and_asked_for = False


def autoload() -> None:
    """Wait for Lightning and Accelerate to be imported. Never raises."""
    global _off_and_asked_for
    try:
        if os.environ.get("BF16_AUTOLOAD", "1").strip().lower() not in _OFF:
            watch()
        elif os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower().startswith(_OURS):
            _off_and_asked_for = True
            watch(_ACCELERATE)
    except Exception as error:
        _warn(f"torch-bf16 could not register itself: {error!r}")


def watch(plugin: str | None = None) -> None:
    """Patch the host modules that are imported, and the others as soon as they are.

    Calling it again does no harm; ``on_import`` has to bear a second call for one module.

    Args:
        plugin: only the targets of this plugin module, for example ``"lightning_bf16._patches"``.

    Example:
        >>> watch("lightning_bf16._patches")
    """
    wanted = {name for name, target in TARGETS.items() if plugin in (None, target)}
    finder = next((f for f in sys.meta_path if isinstance(f, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.names |= wanted
    for name in wanted:
        module = sys.modules.get(name)
        if module is None:
            continue
        if _is_initialising(module):
            _await(module)
        else:
            _tell(module, raising=plugin is not None)


def forget(plugin: str) -> None:
    """Wait no longer for the host modules of a plugin; those that it has patched stay patched.

    Args:
        plugin: a plugin module, for example ``"lightning_bf16._patches"``.

    Example:
        >>> forget("lightning_bf16._patches")
    """
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            finder.names -= {name for name, target in TARGETS.items() if target == plugin}


class _Finder:
    """Finds nothing itself: lets the others find a target and listens to its loader."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.names:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                _listen(spec)
                return spec
        return None


def _listen(spec: ModuleSpec) -> None:
    # An instance attribute, gone before the module runs, leaves the loader and the spec what they
    # were: inspect.getsource, importlib.reload and resources see nothing.
    loader: Any = spec.loader
    try:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            _tell(module)

        loader.exec_module = exec_module
    except Exception as error:
        _warn(f"torch-bf16 cannot follow the import of {spec.name}: {error!r}")


class _Awaited(ModuleSpec):
    """The spec of a module that is being executed: the import system marks there that it is done.

    ``transformers.training_args`` may be the module that imports torch; no finder sees it again.
    """

    @property
    def _initializing(self) -> bool:
        return self.__dict__["_initializing"]

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        if not value:
            self.__class__ = ModuleSpec  # pyright: ignore[reportAttributeAccessIssue]
            module = sys.modules.get(self.name)
            if module is not None and module.__spec__ is self:  # its import has not failed
                _tell(module)


def _await(module: ModuleType) -> None:
    spec = module.__spec__
    if type(spec) is ModuleSpec:
        spec.__class__ = _Awaited


def _tell(module: ModuleType, raising: bool = False) -> None:
    plugin = TARGETS[module.__name__]
    try:
        if _off_and_asked_for and plugin.partition(".")[0] not in sys.modules:
            _guard(module)
            return
        importlib.import_module(plugin).on_import(module)
    except Exception as error:
        if raising:
            raise
        package = plugin.partition(".")[0]
        host = module.__name__.partition(".")[0]
        _warn(
            f"{package} could not add its precision modes to {host}: {error!r}. BF16_AUTOLOAD=0 "
            "turns this off."
        )


def _guard(module: Any) -> None:
    """Let ``prepare`` raise."""
    if module.__name__ == "accelerate.accelerator":
        for name in ("prepare", "prepare_model"):
            method = getattr(module.Accelerator, name)
            if not hasattr(method, "_guarded_by_bf16"):
                setattr(module.Accelerator, name, _refusing(method))


def _refusing(method: Any) -> Any:
    @functools.wraps(method)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        mode = str(self.mixed_precision)
        if mode.lower().startswith(_OURS) and "accelerate_bf16" not in sys.modules:
            raise RuntimeError(
                f"mixed_precision={mode!r} was asked for, but BF16_AUTOLOAD="
                f"{os.environ.get('BF16_AUTOLOAD')} has switched off torch-bf16, which knows what "
                "it means: Accelerate would train in fp32 without saying so. Unset BF16_AUTOLOAD, "
                "or import accelerate_bf16 in the script"
            )
        return method(self, *args, **kwargs)

    prepare._guarded_by_bf16 = True  # pyright: ignore
    return prepare


def _is_initialising(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


_warned: set[str] = set()


def _warn(message: str) -> None:
    if message in _warned:
        return
    _warned.add(message)
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except Exception:  # warnings may be errors, and the host's import must go on
        print(message, file=sys.stderr)
