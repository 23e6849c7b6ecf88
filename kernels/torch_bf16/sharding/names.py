"""What does not depend on wrappers: names of parameters, and what a compiled module runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from torch import nn

__all__ = ["WRAPPERS", "bare_name", "saved_names", "unwrap_compiled", "without_wrappers"]

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


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """What ``torch.compile`` was given: the user's own module, or a wrapper around it."""
    while isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
        model = compiled
    return model


def saved_names(names: Collection[str], saved: Iterable[str]) -> dict[str, str]:
    """The key that each parameter has in a state dict; parameters that have none are left out.

    Args:
        names: names of an optimizer's parameters.
        saved: keys of saved weights, possibly saved without wrappers, or by PEFT, which leaves out
            the name of the adapter, as in ``lora_A.default.weight``.
    """
    left = {*saved}
    found = {name: name for name in names if name in left}
    # A module may hold both "weight" and "module.weight", which are one bare name.
    for shown in (without_wrappers, bare_name):
        left -= {*found.values()}
        keys, asking = _only(left, shown), _only({*names} - found.keys(), shown)
        found |= {name: keys[short] for short, name in asking.items() if short in keys}
    left -= {*found.values()}
    keys = _only(left, bare_name)
    for name in names:
        if name not in found:
            bare = bare_name(name)
            adapted = (re.sub(pattern, "", bare) for pattern in _ADAPTERS)
            key = next((each for each in adapted if each in keys and each != bare), None)
            if key is not None:
                found[name] = keys[key]
    # Saved from a module around the one whose parameters these are: of all that are left, or none.
    left -= {*found.values()}
    keys = _only(left, lambda key: bare_name(key).partition(".")[2])
    unknown = {*names} - found.keys()
    asking = _only(unknown, bare_name)
    if len(asking) == len(unknown) and asking.keys() <= keys.keys():
        found |= {name: keys[short] for short, name in asking.items()}
    return found


def _only(names: Collection[str], shown: Callable[[str], str]) -> dict[str, str]:
    """Names by a shorter form, without those that share it with another."""
    counts = Counter(map(shown, names))
    return {shown(name): name for name in names if counts[shown(name)] == 1}


_ADAPTERS = (r"(\.modules_to_save)?\.[^.]+(?=\.[^.]+$)", r"\.[^.]+$")
