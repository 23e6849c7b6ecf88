"""The contents of an optimizer's attributes and options, however deep."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["names_any", "plain", "within"]


def within(value: Any) -> Iterator[Any]:
    """The tensors, modules and optimizers in a value."""
    for each in _leaves(value):
        if isinstance(each, (Tensor, nn.Module, torch.optim.Optimizer)):
            yield each


def names_any(value: Any, ids: Collection[int]) -> bool:
    """Whether a value holds one of the objects with these ids, or such an id, as keys often are."""
    return any(id(each) in ids or (type(each) is int and each in ids) for each in _leaves(value))


def plain(value: Any, depth: int = 6) -> Any:
    """A nested snapshot of a value that compares equal as long as nothing in the value changes."""
    if isinstance(value, Tensor):
        return value._version, repr(value.item()) if value.numel() == 1 else tuple(value.shape)
    if value is None or isinstance(value, (str, bytes, bool, int, float, complex)):
        return repr(value)
    if depth and isinstance(value, Mapping):
        return [(plain(k, depth - 1), plain(v, depth - 1)) for k, v in value.items()]
    if depth and isinstance(value, (list, tuple, set)):
        return [plain(each, depth - 1) for each in value]
    return plain(vars(value), depth - 1) if depth and _has_attributes(value) else None


def _leaves(value: Any, depth: int = 4) -> Iterator[Any]:
    if isinstance(value, (Tensor, nn.Module, torch.optim.Optimizer)) or not depth:
        yield value
    elif isinstance(value, Mapping):
        for each in (*value.keys(), *value.values()):
            yield from _leaves(each, depth - 1)
    elif isinstance(value, (list, tuple, set)):
        for each in value:
            yield from _leaves(each, depth - 1)
    elif _has_attributes(value):
        # A singleton holds what other models and optimizers of the process have left there.
        if getattr(type(value), "_instance", None) is not value:
            yield from _leaves(vars(value), depth - 1)
    else:
        yield value


def _has_attributes(value: Any) -> bool:
    known = isinstance(value, (type, torch.optim.Optimizer, nn.Module)) or inspect.isroutine(value)
    return hasattr(value, "__dict__") and not known
