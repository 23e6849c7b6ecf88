"""bf16 training for Lightning's Trainer and Fabric.

Importing this package registers two precisions, before or after the hosts are imported::

    import lightning_bf16
    from lightning import Trainer

    Trainer(precision="bf16-stochastic")   # 8 bytes per parameter
    Trainer(precision="bf16-fp32-master")  # 14 bytes per parameter, an exact fp32 master

If torch-bf16 is installed with its metadata, ``import torch`` registers them, and the first line is
not needed. To set options, use the plugin class of the host:

=========================  =================================================
``lightning`` Trainer      ``lightning_bf16.BF16Precision``
``lightning.fabric``       ``lightning_bf16.fabric.BF16Precision``
``pytorch_lightning``      ``lightning_bf16.pytorch_lightning.BF16Precision``
``lightning_fabric``       ``lightning_bf16.lightning_fabric.BF16Precision``
=========================  =================================================

For the two Trainers there is also ``BF16Monitor``, a callback that logs what rounding does.
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
_OLDEST = (2, 5)
_HOSTS = ("lightning", "pytorch_lightning", "lightning_fabric")


def register() -> None:
    """Make the precisions known to every Lightning package, whether imported already or later.

    ``import lightning_bf16`` calls this function; calling it again does no harm.

    Raises:
        ImportError: no Lightning package is installed in a supported version.

    Example:
        >>> import lightning_bf16
        >>> lightning_bf16.register()
    """
    versions, needed = _installed(), ".".join(map(str, _OLDEST))
    if not any(
        version is None or bf16_autoload.version_numbers(version) >= _OLDEST
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
    """Restore every class and type of Lightning that :func:`register` has changed.

    Trainers and Fabrics that are created afterwards do not know our precisions until
    :func:`register` is called again.

    Example:
        >>> lightning_bf16.unregister()
    """
    bf16_autoload.forget(_PATCHES)


def __getattr__(name: str) -> Any:
    # Imported only on access, because this imports a Trainer.
    if name in ("BF16Monitor", "BF16Precision"):
        host = "pytorch" if "lightning" in _installed() else "pytorch_lightning"
        return getattr(importlib.import_module(f"{__name__}.{host}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _installed() -> dict[str, str | None]:
    """The version of each host that can be imported, or None if it has no metadata."""
    versions: dict[str, str | None] = {}
    for host in _HOSTS:
        spec = importlib.util.find_spec(host)
        if spec is not None and spec.origin is not None:  # a mere folder of that name has no origin
            try:
                versions[host] = metadata.version(host)
            except metadata.PackageNotFoundError:
                versions[host] = None
    return versions


register()
