"""Making the modes known, now or as soon as Accelerate is imported, and taking them back."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import PackageNotFoundError, version

import bf16_autoload

__all__ = ["OLDEST", "check_version", "register", "unregister"]

_PATCHES = "accelerate_bf16._patches"

OLDEST = (1, 1)
"""The oldest Accelerate that has every place we change."""


def register() -> None:
    """Make the modes of :data:`MODES` known to Accelerate. Harmless to call again.

    Importing ``accelerate_bf16`` does it; the order of imports does not matter, but it has to
    happen before the first ``prepare``.

    Raises:
        ImportError: Accelerate is missing or too old.

    Example:
        >>> import accelerate_bf16
        >>> accelerate_bf16.register()
    """
    try:
        found = version("accelerate")
    except PackageNotFoundError:
        raise ImportError(
            f"accelerate_bf16 needs Accelerate, which is not installed. {_remedy()}"
        ) from None
    check_version(found)
    bf16_autoload.watch(_PATCHES)


def unregister() -> None:
    """Put back all that :func:`register` has replaced in Accelerate and transformers.

    Models and optimizers that were prepared stay as they are, and what another library has replaced
    on top of ours is left to it. :func:`register` makes the modes known again.

    Example:
        >>> import accelerate_bf16
        >>> accelerate_bf16.unregister()
        >>> accelerate_bf16.register()
    """
    bf16_autoload.forget(_PATCHES)
    importlib.import_module(_PATCHES).patches.undo()


def check_version(found: str) -> None:
    """Refuse an Accelerate that is too old.

    Args:
        found: its version.

    Raises:
        ImportError: it is older than :data:`OLDEST`.

    Example:
        >>> check_version("1.15.0")
    """
    numbers = tuple(int(n) for n in re.findall(r"\d+", found)[:2])
    if numbers < OLDEST:
        raise ImportError(
            f"accelerate_bf16 needs accelerate>={'.'.join(map(str, OLDEST))} and found {found}. "
            + _remedy()
        )


def _remedy() -> str:
    return f'Run: pip install -U "accelerate>={".".join(map(str, OLDEST))}"'
