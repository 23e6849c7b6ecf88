"""Names of parameters, the same whatever has been wrapped around their module."""

from __future__ import annotations

__all__ = ["WRAPPERS", "bare_name", "without_wrappers"]

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
"""Parts that wrappers put into the names of what is inside them."""


def without_wrappers(name: str) -> str:
    """A name without the parts of wrappers that cannot be meant by anything else."""
    if "_" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def bare_name(name: str) -> str:
    """A parameter's name, the same whether its module is compiled, wrapped by DDP, both or none."""
    name = without_wrappers(name)
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
