"""The bf16 weights that optimizers of ours train, and those that they do not."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn

from torch_bf16.parameters import own_parameter, parameters_in

from .cast_modules import bf16_weights, cast_models
from .copied_weights import watched_copies
from .watched_weight import WatchedWeight, is_comparable

__all__ = ["never_trained", "trained_by", "untrained"]

# How many copies of a weight are watched: a pool of snapshots grows without end, and an average is
# made before them, or was just made.
_FIRST, _LAST = 4, 4


def trained_by(optimizers: Iterable[Any]) -> Iterator[Tensor]:
    """The parameters that optimizers have stepped; a target may be in their groups, too."""
    optimizers = [*optimizers]
    # Lists, because another thread may step one of them meanwhile.
    keys = chain.from_iterable(list(dict.keys(each.state)) for each in optimizers)
    yield from (each for each in keys if isinstance(each, Tensor))
    # What another rank steps arrives here by a broadcast.
    zeros = [each._engine.names.zero for each in optimizers]
    yield from chain.from_iterable(each.parameters for each in zeros if each is not None)


def untrained(trained: Container[int]) -> Iterator[WatchedWeight]:
    """The bf16 matrices of cast models that are not trained, and of their first and last copies.

    Args:
        trained: the ids of those that are.
    """
    named: dict[int, tuple[str, weakref.ref[Tensor]]] = {}
    for name, owner, own_name, weight in bf16_weights():
        named[id(weight)] = name, weakref.ref(weight)
        if id(weight) not in trained and is_comparable(weight):
            get = functools.partial(_parameter_of, weakref.ref(owner), own_name, id(weight))
            yield WatchedWeight.of(weight, name, "in the model", get)
    copies: dict[int, list[Tensor]] = {}
    for copy, source in watched_copies():
        if source in named and id(copy) not in trained and is_comparable(copy):
            copies.setdefault(source, []).append(copy)
    for source, those in copies.items():
        name, followed = named[source]
        for copy in those[:_FIRST] + those[_FIRST:][-_LAST:]:
            yield WatchedWeight.of(copy, name, "copy", weakref.ref(copy), followed)


def never_trained(trained: Container[int]) -> dict[int, str]:
    """The weights of cast models in which nothing is trained: by id, the class of the model."""
    alone: dict[int, str] = {}
    for model in cast_models():
        numbers = [id(each) for each in parameters_in(model)]
        if not any(each in trained for each in numbers):
            alone.update(dict.fromkeys(numbers, type(model).__name__))
    return alone


def _parameter_of(
    owner_of: Callable[[], nn.Module | None], name: str, number: int
) -> Tensor | None:
    owner = owner_of()
    weight = None if owner is None else own_parameter(owner, name)
    return weight if id(weight) == number else None
