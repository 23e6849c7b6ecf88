"""Precision modes for Hugging Face Accelerate: bf16 weights that learn what fp32 ones would.

Importing this package makes ``bf16-stochastic`` and ``bf16-fp32-master`` known to Accelerate. Where
torch-bf16 is installed (and ``BF16_AUTOLOAD`` is not 0) nothing has to be imported: the modes are
there as soon as Accelerate is, also in its command line and in the processes that it launches.

Example:
    >>> from accelerate import Accelerator
    >>> accelerator = Accelerator(mixed_precision="bf16-stochastic")
    >>> model, optimizer = accelerator.prepare(model, optimizer)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .modes import ALIASES, MODES
from .registration import register, unregister

if TYPE_CHECKING:
    from .recipe_options import BF16RecipeKwargs

__all__ = ["ALIASES", "MODES", "BF16RecipeKwargs", "register", "unregister"]


def __getattr__(name: str) -> Any:
    # Late, because it imports Accelerate.
    if name == "BF16RecipeKwargs":
        from .recipe_options import BF16RecipeKwargs

        return BF16RecipeKwargs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
