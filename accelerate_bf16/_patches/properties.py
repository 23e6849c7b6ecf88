"""Properties of Accelerate's classes that are replaced until all is put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from bf16_autoload import Patches

__all__ = ["replace_property"]


def replace_property(
    patches: Patches, owner: type, name: str, make: Callable[[Any], Callable[[Any], Any]]
) -> bool:
    """Put the getter ``make(getter)`` in a property's place; False if one of ours is there."""
    getter: Any = getattr(owner, name).fget
    if getattr(getter, "_replaced_by", None) is patches:
        return False
    replacement: Any = functools.wraps(getter)(make(getter))
    replacement._replaced_by = patches
    patches.set(owner, name, property(replacement))
    return True
