"""The zero-import hook, which torch calls at the end of ``import torch``, and changes to hosts.

`autoload` is the entry point ``bf16`` of the group ``torch.backends``. It puts one finder in front
of ``sys.meta_path`` that waits for a handful of modules of Lightning and Accelerate. When one of
them has been imported, and before anybody else sees it, the plugin of that host gets to add its
precision names::

    importlib.import_module(plugin).on_import(host_module)

The plugin makes its changes through a `Patches` object, its ``patches``, which remembers the
originals.

Nothing of ours is imported until then. torch is half-initialised while `autoload` runs, and an
exception there would make ``import torch`` fail for every program of the environment, so this file
imports the standard library only, catches everything, and is a module of its own: a submodule of a
package would run that package's ``__init__``.

``BF16_AUTOLOAD=0`` turns it off; ``import lightning_bf16`` and ``import accelerate_bf16`` work
without it. One thing is done even then: where ``ACCELERATE_MIXED_PRECISION`` or ``BF16_MODE`` names
a mode of ours and nobody imports the plugin, ``Accelerator.prepare``, ``Trainer`` and ``Fabric``
raise, because Accelerate does not validate the former and no host knows the latter.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
import warnings
import weakref
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = [
    "TARGETS",
    "Patches",
    "autoload",
    "forget",
    "resembles_a_mode",
    "version_numbers",
    "watch",
]

_LIGHTNING = "lightning_bf16._patches"
_ACCELERATE = "accelerate_bf16._patches"

TARGETS: dict[str, str] = {
    "lightning.fabric.connector": _LIGHTNING,
    "lightning.fabric.fabric": _LIGHTNING,
    "lightning.fabric.strategies.deepspeed": _LIGHTNING,
    "lightning.pytorch.callbacks.weight_averaging": _LIGHTNING,
    "lightning.pytorch.strategies.deepspeed": _LIGHTNING,
    "lightning.pytorch.strategies.strategy": _LIGHTNING,
    "lightning.pytorch.trainer.connectors.accelerator_connector": _LIGHTNING,
    "lightning.pytorch.trainer.trainer": _LIGHTNING,
    "lightning_fabric.connector": _LIGHTNING,
    "lightning_fabric.fabric": _LIGHTNING,
    "lightning_fabric.strategies.deepspeed": _LIGHTNING,
    "pytorch_lightning.callbacks.weight_averaging": _LIGHTNING,
    "pytorch_lightning.strategies.deepspeed": _LIGHTNING,
    "pytorch_lightning.strategies.strategy": _LIGHTNING,
    "pytorch_lightning.trainer.connectors.accelerator_connector": _LIGHTNING,
    "pytorch_lightning.trainer.trainer": _LIGHTNING,
    "accelerate.accelerator": _ACCELERATE,
    "accelerate.commands.config.config_utils": _ACCELERATE,
    "accelerate.commands.config.default": _ACCELERATE,
    "accelerate.commands.test": _ACCELERATE,
    "accelerate.commands.utils": _ACCELERATE,
    "accelerate.launchers": _ACCELERATE,
    "accelerate.local_sgd": _ACCELERATE,
    "accelerate.state": _ACCELERATE,
    "accelerate.utils.dataclasses": _ACCELERATE,
    "accelerate.utils.fsdp_utils": _ACCELERATE,
    "accelerate.utils.launch": _ACCELERATE,
    "peft.tuners.tuners_utils": _ACCELERATE,
    "transformers.integrations.deepspeed": _ACCELERATE,
    "transformers.trainer": _ACCELERATE,
    "transformers.training_args": _ACCELERATE,
}
"""Module of a host -> module of ours whose ``on_import(host_module)`` runs right after it."""

_OFF = ("0", "false", "no", "off")
_only_guards = False


def autoload() -> None:
    """Wait for Lightning and Accelerate to be imported. Never raises."""
    global _only_guards
    try:
        if os.environ.get("BF16_AUTOLOAD", "1").strip().lower() not in _OFF:
            watch()
        elif _names_a_mode():
            _only_guards = True
            watch()
    except Exception as error:
        _warn(f"torch-bf16 could not register itself: {error!r}")


def _names_a_mode() -> bool:
    launcher_mode = os.environ.get("ACCELERATE_MIXED_PRECISION", "")
    return resembles_a_mode(launcher_mode) or bool(_overriding_mode())


def resembles_a_mode(value: str) -> bool:
    """Whether Accelerate's ``mixed_precision`` is a mode of ours, or a misspelt one.

    Example:
        >>> [resembles_a_mode(each) for each in ("BF16_stochastic", "fp32-master", "bf16", "fp32")]
        [True, True, False, False]
    """
    letters = re.sub("[^a-z0-9]", "", value.lower())
    ours = letters.startswith("bf16") or "stochastic" in letters or "master" in letters
    return ours and letters != "bf16"


def _overriding_mode() -> str:
    return os.environ.get("BF16_MODE", "").strip()


def watch(plugin: str | None = None) -> None:
    """Patch the host modules that are imported already, and the others as soon as they are.

    Calling it again does no harm; ``on_import`` must tolerate a second call for the same module.

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
        spec = getattr(module, "__spec__", None)
        if not getattr(spec, "_initializing", False):
            _patch(name, module, raising=plugin is not None)
        elif type(spec) is ModuleSpec:
            spec.__class__ = _Awaited


def forget(plugin: str) -> None:
    """Stop waiting for the host modules of a plugin, and undo its changes to those it has patched.

    Args:
        plugin: a plugin module, for example ``"lightning_bf16._patches"``.

    Example:
        >>> forget("lightning_bf16._patches")
    """
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            finder.names -= {name for name, target in TARGETS.items() if target == plugin}
    importlib.import_module(plugin).patches.undo()


def version_numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a host's version, which plugins check before they import torch.

    Example:
        >>> version_numbers("2.6.0.dev20251103")
        (2, 6)
    """
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


_ABSENT: Any = object()


class Patches:
    """Changes made to a host; :meth:`undo`, or the end of a ``with`` block, reverts them.

    Example:
        >>> import textwrap
        >>> patches = Patches()
        >>> patches.replace(textwrap, "dedent", lambda old: lambda text: old(text).upper())
        >>> textwrap.dedent("  hello")
        'HELLO'
        >>> patches.undo()
        >>> textwrap.dedent("  hello")
        'hello'
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []
        self._handles: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def replace(self, module: ModuleType, path: str, make: Callable[[Any], Any]) -> None:
        """Replace a method of a class, or a function wherever it was imported by name; once.

        Args:
            module: where the class or the function is defined; mutated.
            path: ``"Class.method"`` or ``"function"``; a method may be inherited.
            make: takes the original and returns its replacement.
        """
        *classes, name = path.split(".")
        owner = functools.reduce(getattr, classes, module)
        original = getattr(owner, name)
        if getattr(original, "_replaced_by", None) is self:
            return
        replacement: Any = functools.wraps(original)(make(original))
        replacement._replaced_by = self
        if classes:
            static = isinstance(inspect.getattr_static(owner, name), staticmethod)
            self.set(owner, name, staticmethod(replacement) if static else replacement)
        else:
            _rebind(name, original, replacement)
            self._undo.append(functools.partial(_rebind, name, replacement, original))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute. A value that somebody else puts there later survives :meth:`undo`."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)

        def undo() -> None:
            if vars(owner).get(name) is value:
                delattr(owner, name) if before is _ABSENT else setattr(owner, name, before)

        self._undo.append(undo)

    def add(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        """Add an entry to a dictionary that has none under this key."""
        if key not in table:
            table[key] = value
            self._undo.append(functools.partial(table.pop, key, None))

    def append(self, items: list[Any], value: Any) -> None:
        """Append to a list."""
        items.append(value)
        self._undo.append(functools.partial(items.remove, value))

    def keep(self, handle: Any, owner: Any) -> None:
        """Keep the last handle of an owner's hook, while that lives, for :meth:`undo`."""
        self._handles[owner] = handle

    def undo(self) -> None:
        """Undo all changes, the last one first."""
        while self._handles:
            self._handles.popitem()[1].remove()
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *_: Any) -> None:
        self.undo()


def _rebind(name: str, old: Any, new: Any) -> None:
    for holder in list(sys.modules.values()):
        if isinstance(holder, ModuleType) and vars(holder).get(name) is old:
            setattr(holder, name, new)


_guards = Patches()


class _Finder:
    """Finds nothing itself: lets the other finders find a target, and hooks into its loader."""

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
                _patch_once_executed(spec)
                return spec
        return None


def _patch_once_executed(spec: ModuleSpec) -> None:
    # An instance attribute, removed before the module runs, leaves the loader and the spec as they
    # were: inspect.getsource, importlib.reload and resources notice nothing.
    loader: Any = spec.loader
    try:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # All modules of a zip file have one loader.
            awaited = module.__name__ == spec.name and vars(loader).pop("exec_module", None)
            execute(module)
            if awaited:
                _patch(spec.name, module)

        loader.exec_module = exec_module
    except Exception as error:
        _warn(f"torch-bf16 cannot follow the import of {spec.name}: {error!r}")


class _Awaited(ModuleSpec):
    """The spec of a module that is being executed; the import system notes there when it is done.

    ``transformers.training_args`` may be the module that imports torch: no finder will see it.
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
                _patch(self.name, module)


def _patch(name: str, module: ModuleType, raising: bool = False) -> None:
    plugin = TARGETS[name]
    package, host = plugin.partition(".")[0], name.partition(".")[0]
    try:
        if _only_guards and package not in sys.modules:
            _guard(module)
        else:
            importlib.import_module(plugin).on_import(module)
    except Exception as error:
        if raising:
            raise
        _warn(
            f"{package} could not add its precision modes to {host}: {error!r}. BF16_AUTOLOAD=0 "
            "turns this off."
        )


def _guard(module: ModuleType) -> None:
    """Make the calls raise that would train in another precision."""
    if module.__name__ == "accelerate.accelerator":
        for name in ("prepare", "prepare_model"):
            _guards.replace(module, f"Accelerator.{name}", _refusing)
    for name in ("_AcceleratorConnector", "_Connector"):
        if hasattr(vars(module).get(name), "_check_and_init_precision"):
            _guards.replace(module, f"{name}._check_and_init_precision", _refusing_precision)


def _refusing_precision(method: Callable[..., Any]) -> Callable[..., Any]:
    def _check_and_init_precision(self: Any) -> Any:
        mode = _overriding_mode()
        if mode and "lightning_bf16" not in sys.modules:
            raise RuntimeError(_switched_off(f"BF16_MODE={mode}", "Lightning", "its own precision"))
        return method(self)

    return _check_and_init_precision


def _switched_off(asked: str, host: str, instead: str) -> str:
    return (
        f"{asked} was asked for, but BF16_AUTOLOAD={os.environ.get('BF16_AUTOLOAD')} has switched "
        f"off torch-bf16, which knows what it means: {host} would train in {instead} without "
        f"saying so. Unset BF16_AUTOLOAD, or import {host.lower()}_bf16 in the script"
    )


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked, instead = "", str(self.mixed_precision)
        if resembles_a_mode(instead):
            asked, instead = f"mixed_precision={instead!r}", "fp32"
        elif mode := _overriding_mode():
            asked = f"BF16_MODE={mode}"
        if asked and "accelerate_bf16" not in sys.modules:
            raise RuntimeError(_switched_off(asked, "Accelerate", instead))
        return method(self, *args, **kwargs)

    return prepare


_warned: set[str] = set()


def _warn(message: str) -> None:
    if message in _warned:
        return
    _warned.add(message)
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except Exception:  # warnings may be errors, and the host's import must go on
        print(message, file=sys.stderr)
