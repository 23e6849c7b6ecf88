"""bf16 training for Lightning's Trainer and Fabric.

Importing it makes two precisions known, in any order with the hosts::

    import lightning_bf16
    from lightning import Trainer

    Trainer(precision="bf16-stochastic")   # 8 bytes per parameter
    Trainer(precision="bf16-fp32-master")  # 14 bytes per parameter, an exact fp32 master

Where torch-bf16 is installed with its metadata, torch itself announces it, and the first line is
not needed. The plugin class, for options, of each host:

=========================  =================================================
``lightning`` Trainer      ``lightning_bf16.BF16Precision``
``lightning.fabric``       ``lightning_bf16.fabric.BF16Precision``
``pytorch_lightning``      ``lightning_bf16.pytorch_lightning.BF16Precision``
``lightning_fabric``       ``lightning_bf16.lightning_fabric.BF16Precision``
=========================  =================================================

``BF16Monitor`` beside them, for the two Trainers, is a callback that logs what rounding does.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib import metadata
from typing import TYPE_CHECKING, Any

import bf16_autoload

if TYPE_CHECKING:
    from .pytorch import BF16Monitor, BF16Precision

__all__ = ["BF16Monitor", "BF16Precision", "register", "unregister"]

_PATCHES = "lightning_bf16._patches"
_NEEDED = (2, 5)
_HOSTS = ("lightning", "pytorch_lightning", "lightning_fabric")


def register() -> None:
    """Make the precisions known to every Lightning package, imported already or later.

    ``import lightning_bf16`` calls it; calling it again does no harm.

    Raises:
        ImportError: no Lightning package is installed in a version that can be used.

    Example:
        >>> import lightning_bf16
        >>> lightning_bf16.register()
    """
    versions, needed = _installed(), ".".join(map(str, _NEEDED))
    if not any(
        version is None or bf16_autoload.version_numbers(version) >= _NEEDED
        for version in versions.values()
    ):
        listed = (
            ", ".join(f"{host} {version}" for host, version in versions.items()) or "none of them"
        )
        raise ImportError(
            f"lightning_bf16 needs lightning, pytorch_lightning or lightning_fabric >= {needed}; "
            f"found {listed}. pip install 'lightning>={needed}'"
        )
    bf16_autoload.watch(_PATCHES)


def unregister() -> None:
    """Put back every class and type of Lightning that :func:`register` has changed.

    For Trainers and Fabrics that are made afterwards: our precisions are unknown to them until
    :func:`register` is called again.

    Example:
        >>> lightning_bf16.unregister()
    """
    bf16_autoload.forget(_PATCHES)


def __getattr__(name: str) -> Any:
    # Late, because it imports a Trainer.
    if name in ("BF16Monitor", "BF16Precision"):
        host = "pytorch" if "lightning" in _installed() else "pytorch_lightning"
        return getattr(importlib.import_module(f"{__name__}.{host}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _installed() -> dict[str, str | None]:
    """Version of each host that can be imported, None where it has no metadata."""
    versions: dict[str, str | None] = {}
    for host in _HOSTS:
        spec = importlib.util.find_spec(host)
        if spec is not None and spec.origin is not None:  # a mere folder of that name has none
            try:
                versions[host] = metadata.version(host)
            except metadata.PackageNotFoundError:
                versions[host] = None
    return versions


register()
