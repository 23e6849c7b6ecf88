"""Making the modes known, now or as soon as Accelerate is imported."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

import bf16_autoload

__all__ = ["OLDEST", "check_version", "register"]

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
    for seam in ("_host", "_host_commands", "_host_trainer"):
        bf16_autoload.watch(f"accelerate_bf16.{seam}")


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
