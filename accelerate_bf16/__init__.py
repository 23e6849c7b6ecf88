"""Precision modes for Hugging Face Accelerate: bf16 weights that learn what fp32 ones would.

Importing this package makes ``bf16-stochastic`` and ``bf16-fp32-master`` known to Accelerate. If
torch-bf16 is installed (and ``BF16_AUTOLOAD`` is not 0) no import is needed: the modes are there
whenever Accelerate is imported, also in its command line and in the processes that it launches.

Example:
    >>> from accelerate import Accelerator
    >>> accelerator = Accelerator(mixed_precision="bf16-stochastic")
    >>> model, optimizer = accelerator.prepare(model, optimizer)
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import bf16_autoload

from .modes import MODES

if TYPE_CHECKING:
    from .recipe_options import BF16RecipeKwargs

__all__ = ["MODES", "BF16RecipeKwargs", "register", "unregister"]

_PATCHES = "accelerate_bf16._patches"
_OLDEST = (1, 1)


def register() -> None:
    """Make the modes of :data:`MODES` known to Accelerate. Harmless to call again.

    Importing ``accelerate_bf16`` calls this function. The order of imports does not matter, but the
    call must come before the first ``prepare``.

    Raises:
        ImportError: Accelerate is missing or too old.

    Example:
        >>> import accelerate_bf16
        >>> accelerate_bf16.register()
    """
    try:
        installed = version("accelerate")
        is_too_old = bf16_autoload.version_numbers(installed) < _OLDEST
        fault = f" and found {installed}" if is_too_old else None
    except PackageNotFoundError:
        fault = ", which is not installed"
    if fault:
        needed = f"accelerate>={'.'.join(map(str, _OLDEST))}"
        raise ImportError(f'accelerate_bf16 needs {needed}{fault}. Run: pip install -U "{needed}"')
    bf16_autoload.watch(_PATCHES)


def unregister() -> None:
    """Restore everything that :func:`register` has replaced in Accelerate, transformers and peft.

    Models and optimizers that were already prepared stay as they are, and so does anything that
    another library has replaced on top of ours. An Accelerator that was made in a mode prepares
    nothing more, as it would in fp32. :func:`register` makes the modes known again.

    Example:
        >>> import accelerate_bf16
        >>> accelerate_bf16.unregister()
        >>> accelerate_bf16.register()
    """
    bf16_autoload.forget(_PATCHES)


def __getattr__(name: str) -> Any:
    # Imported only on access, because this imports Accelerate.
    if name == "BF16RecipeKwargs":
        from .recipe_options import BF16RecipeKwargs

        return BF16RecipeKwargs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
