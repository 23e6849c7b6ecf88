"""Maps the tensors in what modules take and return, however nested."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import UserList, deque
from collections.abc import Callable, Mapping, MutableMapping
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Transform
from torch.utils._pytree import tree_flatten, tree_unflatten

from .autocast import widen

__all__ = ["map_arguments", "map_tensors", "widen_tensors"]


def widen_tensors(data: Any) -> Any:
    """``data`` with its bf16 tensors in fp32; itself if there is none.

    They are found in tuples, lists, dicts, and what else ``torch.utils._pytree`` knows, and in
    dataclasses, mappings and distributions of ``torch.distributions``. What forbids copies or
    writes, or is nested too deep to be followed, stays as it is.

    Example:
        >>> plugin_api.widen_tensors({"loss": torch.ones((), dtype=torch.bfloat16), "n": 3})
        {'loss': tensor(1.), 'n': 3}
    """
    return map_tensors(widen, data)


def map_tensors(function: Callable[[Tensor], Tensor], data: Any) -> Any:
    """``data`` with ``function`` applied to all tensors in it; itself if it changes none.

    Also in dataclasses, mappings, and distributions of ``torch.distributions``. Where a container
    holds itself, the copy of it holds the original.
    """
    try:
        return _map_inside((), frozenset(), function, data)
    except RecursionError:
        pass
    try:
        return _map_inside((), frozenset(_circles(data)), function, data)
    except RecursionError:
        return data


def map_arguments(
    function: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply ``function`` to the tensors in the arguments of a part of a model.

    An argument in which nothing changes stays the same object: a part may write into it, such as
    the cache of a transformer. Dataclasses, mappings and distributions are left alone, and so
    are containers that hold themselves.
    """
    return (
        tuple(_map_argument(function, each) for each in args),
        {name: _map_argument(function, each) for name, each in kwargs.items()},
    )


def _map_argument(function: Callable[[Tensor], Tensor], argument: Any) -> Any:
    if isinstance(argument, Tensor):  # most are, and every layer of a model comes here
        return function(argument)
    try:
        leaves, structure = tree_flatten(argument)
    except RecursionError:
        return argument
    new = [function(each) if isinstance(each, Tensor) else each for each in leaves]
    return argument if _are_same(leaves, new) else tree_unflatten(new, structure)


def _are_same(before: list[Any], after: list[Any]) -> bool:
    return all(map(is_, before, after))


def _circles(data: Any) -> set[int]:
    """The ids of containers that hold themselves, of those that pytree walks."""
    found: set[int] = set()
    done: set[int] = set()
    open_now: set[int] = set()

    def walk(node: Any) -> None:
        if id(node) in open_now:
            found.add(id(node))
        elif id(node) not in done and isinstance(node, (tuple, list, deque, dict)):
            open_now.add(id(node))
            for each in node.values() if isinstance(node, dict) else node:
                walk(each)
            open_now.remove(id(node))
            done.add(id(node))

    walk(data)
    return found


def _map_inside(
    outer: tuple[Any, ...],
    circles: frozenset[int],
    function: Callable[[Tensor], Tensor],
    data: Any,
) -> Any:
    is_leaf = functools.partial(_is_circle_or_size, circles) if circles else _is_size
    leaves, structure = tree_flatten(data, is_leaf=is_leaf)
    new = [_map_leaf(outer, circles, function, each) for each in leaves]
    return data if _are_same(leaves, new) else tree_unflatten(new, structure)


def _is_size(data: Any) -> bool:
    return isinstance(data, torch.Size)  # a tuple would lose its methods


def _is_circle_or_size(circles: frozenset[int], data: Any) -> bool:
    return id(data) in circles or _is_size(data)


def _map_leaf(
    outer: tuple[Any, ...],
    circles: frozenset[int],
    function: Callable[[Tensor], Tensor],
    leaf: Any,
) -> Any:
    if isinstance(leaf, Tensor):
        return function(leaf)
    # An object that refers back to one that it is in would be followed forever.
    if any(each is leaf for each in outer):
        return leaf
    if isinstance(leaf, (list, tuple, UserList)):  # of a class that pytree does not know
        inner = (*outer, leaf)
        new = [_map_inside(inner, circles, function, each) for each in leaf]
        return leaf if _are_same([*leaf], new) else _sequence_with(leaf, new)
    old = _contents(leaf)
    if old is None:
        return leaf
    new = _map_inside((*outer, leaf), circles, function, old)
    # A cache that the model writes into must stay the object that the caller holds.
    return leaf if new is old else _copy_with(leaf, new)


def _contents(leaf: Any) -> dict[Any, Any] | None:
    """What a mapping, a dataclass or a distribution holds; None if it does not tell, or is another.

    Its methods and properties may raise anything.
    """
    try:
        if isinstance(leaf, Mapping):
            return dict(leaf.items())
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, nn.Module)):
            names = [each.name for each in dataclasses.fields(leaf) if hasattr(leaf, each.name)]
            return {name: getattr(leaf, name) for name in names}
        if isinstance(leaf, (Distribution, Transform)):
            return dict(leaf.__dict__)
    except Exception:
        pass
    return None


def _sequence_with(leaf: Any, contents: list[Any]) -> Any:
    try:
        if isinstance(leaf, tuple):  # whose class may have a constructor of its own
            made = tuple.__new__(type(leaf), contents)
            if hasattr(leaf, "__dict__"):
                made.__dict__.update(leaf.__dict__)
        else:
            made = copy.copy(leaf)
            made[:] = contents
    except Exception:
        return leaf
    return made


def _copy_with(leaf: Any, contents: dict[Any, Any]) -> Any:
    """A copy that holds something else, or the object itself if it forbids copies or writes."""
    is_mapping = isinstance(leaf, Mapping)
    try:
        if is_mapping and not isinstance(leaf, MutableMapping):
            return type(leaf)(contents)  # pyright: ignore[reportCallIssue]
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
