"""The contents of an optimizer's attributes and options, however deep."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["names_any", "objects_in", "snapshot", "within"]

_ATOMS = (NoneType, int, float, complex, str, bytes)


def within(value: Any) -> Iterator[Any]:
    """The tensors, modules and optimizers in a value."""
    for each in _leaves(value):
        if issubclass(type(each), (Tensor, nn.Module, torch.optim.Optimizer)):
            yield each


def names_any(value: Any, ids: Collection[int]) -> bool:
    """Whether a value holds one of the objects with these ids, or such an id, as keys often are."""
    return any(id(each) in ids or (type(each) is int and each in ids) for each in _leaves(value))


def snapshot(value: Any, depth: int = 6) -> list[Any]:
    """A snapshot of a value that compares equal as long as nothing in the value changes."""
    found, level, seen = [], [value], {}
    for left in range(depth, -1, -1):
        inner = []
        for each in level:
            kind = type(each)
            if issubclass(kind, _ATOMS):
                found.append(repr(each))
            elif issubclass(kind, Tensor):
                number = repr(each.item()) if each.numel() == 1 else tuple(each.shape)
                found.append((each._version, number))
            elif id(each) in seen:
                found.append(seen[id(each)][0])
            else:
                # With the object, so that no other gets its id.
                seen[id(each)] = len(seen), each
                contents = _contents(each) if left else None
                found.append((kind, None if contents is None else len(contents)))
                inner += contents or ()
        level = inner
    return found


def objects_in(value: Any) -> Iterator[Any]:
    """A value and all objects in it that may change, each once, level by level."""
    return (each for each, _ in _walk(value, depth=6) if not issubclass(type(each), _ATOMS))


def _leaves(value: Any) -> Iterator[Any]:
    """What a value holds that holds nothing itself, each object once, level by level."""
    return (each for each, contents in _walk(value, depth=4) if contents is None)


def _walk(value: Any, depth: int) -> Iterator[tuple[Any, Collection[Any] | None]]:
    """A value and what is in it, level by level, each with its contents; each object once."""
    level, seen = [value], {}
    for left in range(depth, -1, -1):
        inner = []
        for each in level:
            if issubclass(type(each), _ATOMS):
                yield each, None
            elif id(each) not in seen:
                # With the object, so that no other gets its id.
                seen[id(each)] = each
                contents = _contents(each) if left and not _is_singleton(each) else None
                yield each, contents
                inner += contents or ()
        level = inner


def _contents(value: Any) -> Collection[Any] | None:
    """What is directly in a value; None if it is not looked into."""
    try:
        if isinstance(value, (Tensor, nn.Module, torch.optim.Optimizer)):
            return None
        if isinstance(value, Mapping):
            return [*value.keys(), *value.values()]
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return [*value]
        known = isinstance(value, type) or inspect.isroutine(value)
        return [*vars(value).values()] if hasattr(value, "__dict__") and not known else None
    except Exception:
        # Its class may raise anything, and so does a weak proxy of what is gone.
        return None


def _is_singleton(value: Any) -> bool:
    """Whether it holds what other models and optimizers of the process have left there, too."""
    return vars(type(value)).get("_instance") is value
