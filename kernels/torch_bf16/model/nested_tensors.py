"""Maps the tensors in what modules take and return, however nested."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, MutableMapping
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Transform
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["map_arguments", "map_tensors"]


def map_tensors(function: Callable[[Tensor], Tensor], data: Any) -> Any:
    """``data`` with ``function`` applied to all tensors in it.

    Also in dataclasses, mutable mappings, and distributions of ``torch.distributions``.
    """
    return _map_inside((), function, data)


def map_arguments(
    function: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply ``function`` to the tensors in the arguments of a part of a model.

    An argument in which nothing changes stays the same object: a part may write into it, such as
    the cache of a transformer. Dataclasses, mutable mappings and distributions are left alone.
    """
    return (
        tuple(_map_argument(function, each) for each in args),
        {name: _map_argument(function, each) for name, each in kwargs.items()},
    )


def _map_argument(function: Callable[[Tensor], Tensor], argument: Any) -> Any:
    if isinstance(argument, Tensor):  # most are, and every layer of a model comes here
        return function(argument)
    leaves, structure = tree_flatten(argument)
    new = [function(each) if isinstance(each, Tensor) else each for each in leaves]
    return argument if _are_same(leaves, new) else tree_unflatten(new, structure)


def _are_same(before: list[Any], after: list[Any]) -> bool:
    return all(map(is_, before, after))


def _map_inside(outer: tuple[Any, ...], function: Callable[[Tensor], Tensor], data: Any) -> Any:
    return tree_map(functools.partial(_map_leaf, outer, function), data, is_leaf=_is_size)


def _is_size(data: Any) -> bool:
    return isinstance(data, torch.Size)  # a tuple would lose its methods


def _map_leaf(outer: tuple[Any, ...], function: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return function(leaf)
    if isinstance(leaf, list):  # of a class that pytree does not know
        new = [_map_inside(outer, function, each) for each in leaf]
        return leaf if _are_same(leaf, new) else _list_with(leaf, new)
    # An object that refers back to one that it is in would be followed forever.
    old = None if any(each is leaf for each in outer) else _contents(leaf)
    if old is None:
        return leaf
    new = _map_inside((*outer, leaf), function, old)
    # A cache that the model writes into must stay the object that the caller holds.
    if _are_same(tree_leaves(old), tree_leaves(new)):
        return leaf
    return _copy_with(leaf, new)


def _contents(leaf: Any) -> dict[Any, Any] | None:
    """What a mapping, a dataclass or a distribution holds; None if it does not tell, or is another.

    Its methods and properties may raise anything.
    """
    try:
        if isinstance(leaf, MutableMapping):
            return dict(leaf.items())
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, nn.Module)):
            names = [each.name for each in dataclasses.fields(leaf) if hasattr(leaf, each.name)]
            return {name: getattr(leaf, name) for name in names}
        if isinstance(leaf, (Distribution, Transform)):
            return dict(leaf.__dict__)
    except Exception:
        pass
    return None


def _list_with(leaf: list[Any], contents: list[Any]) -> Any:
    try:
        made = copy.copy(leaf)
        made[:] = contents
    except Exception:
        return leaf
    return made


def _copy_with(leaf: Any, contents: dict[Any, Any]) -> Any:
    """A copy that holds something else, or the object itself if it forbids copies or writes."""
    is_mapping = isinstance(leaf, MutableMapping)
    try:
        made = copy.copy(leaf)
        if is_mapping and hasattr(made, "__dict__"):
            # A copy of a mapping may share the dict that it is kept in.
            for name, each in list(made.__dict__.items()):
                if isinstance(each, dict):
                    made.__dict__[name] = each.copy()
        for name, each in contents.items():
            if is_mapping:
                made[name] = each
            else:
                object.__setattr__(made, name, each)
    except Exception:
        return leaf
    return made
