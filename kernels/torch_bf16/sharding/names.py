"""Names of parameters that do not depend on the wrappers around their module."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

__all__ = ["WRAPPERS", "bare_name", "saved_names", "without_wrappers"]

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
"""Parts that wrappers put into the names of what is inside them."""


def without_wrappers(name: str) -> str:
    """A name without the parts that can only come from a wrapper."""
    if "_" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def bare_name(name: str) -> str:
    """A parameter's name, the same if its module is compiled, wrapped by DDP, both or neither."""
    name = without_wrappers(name)
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def saved_names(names: Collection[str], saved: Iterable[str]) -> dict[str, str]:
    """The key that each parameter has in a state dict; parameters that have none are left out.

    Args:
        names: names of an optimizer's parameters.
        saved: keys of saved weights, possibly saved without wrappers, or by PEFT, which leaves out
            the name of the adapter, as in ``lora_A.default.weight``.
    """
    keys = {bare_name(key): key for key in saved}
    found = {name: keys[bare_name(name)] for name in names if bare_name(name) in keys}
    left = keys.keys() - set(map(bare_name, found))
    for name in names:
        if name not in found:
            adapted = (re.sub(pattern, "", bare_name(name)) for pattern in _ADAPTERS)
            key = next((each for each in adapted if each in left), None)
            if key is not None:
                found[name] = keys[key]
    return found


_ADAPTERS = (r"(\.modules_to_save)?\.[^.]+(?=\.[^.]+$)", r"\.[^.]+$")
