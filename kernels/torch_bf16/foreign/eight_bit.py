"""Optimizers of bitsandbytes: which have 8-bit moments, and what they are told beside options."""

from __future__ import annotations

from typing import Any

from torch_bf16.parameters import parameters_of

__all__ = ["eight_bit", "overridden"]

_OURS = {
    "bitsandbytes.optim.adam": "Adam",
    "bitsandbytes.optim.adamw": "AdamW",
    "bitsandbytes.optim.lion": "Lion",
}
# What the Trainer asks for embeddings, which an optimizer without 8-bit moments has anyway.
_NO_CHANGE = ("optim_bits", 32)


def eight_bit(optimizer: Any) -> str | None:
    """The name of our class for an optimizer with 8-bit moments, or None.

    The classes without ``8bit`` in their names have them with ``optim_bits=8``, which is how the
    Hugging Face Trainer makes them.
    """
    ours, name = _OURS.get(type(optimizer).__module__), type(optimizer).__qualname__
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    known = ours is not None and name.removeprefix("Paged").removesuffix("8bit") == ours
    return ours if known and (name.endswith("8bit") or bits == 8) else None


def overridden(optimizer: Any) -> list[str]:
    """Options of single parameters in the ``GlobalOptimManager``, unless they change nothing.

    There is one manager in a process: it has overrides for other models, too, and the Trainer's for
    embeddings, which an 8-bit optimizer is to keep in 32 bits.
    """
    manager = getattr(optimizer, "mng", None)
    if not type(optimizer).__module__.startswith("bitsandbytes.") or manager is None:
        return []
    owned = {*map(id, parameters_of(optimizer))}
    configs = [config for key, config in manager.pid2config.items() if key in owned]
    for module, name, config in manager.module_weight_config_triple:
        if id(getattr(module, name)) in owned:
            configs.append(config)
    changes = {
        name for each in configs for name, value in each.items() if (name, value) != _NO_CHANGE
    }
    return sorted(changes)
