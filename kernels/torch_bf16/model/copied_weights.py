"""Deep copies of bf16 weights, and what each is a copy of.

Target networks, averages, clients and the inner models of meta-learning are made by
``copy.deepcopy``. Nothing else connects them with the model that was cast.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from torch_bf16.locks import fork_safe_lock

__all__ = ["forget_sources", "leave_copies", "note_copy", "source_of", "sources", "watched_copies"]


@dataclass
class _Copy:
    """What is known about a copy.

    Attributes:
        source: the id of the weight that it, or what it copied, is a copy of.
        is_watched: False once it is left alone; see :func:`leave_copies`.
    """

    source: int
    is_watched: bool = True


_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()
# A signal handler, or a finalizer, may copy weights in the middle of these functions.
_lock = fork_safe_lock()


def note_copy(copy: Tensor, source: Tensor) -> None:
    """Remember, for as long as it lives, that a weight is a deep copy of another one."""
    with _lock:
        origin = _copies.get(source)
        _copies[copy] = _Copy(id(source) if origin is None else origin.source)


def source_of(weight: Tensor) -> int | None:
    """The id of the weight that a copy comes from in the end; None for what was not copied."""
    copy = _copies.get(weight)
    return None if copy is None else copy.source


def sources() -> set[int]:
    """The ids of all weights that copies come from in the end."""
    with _lock:
        return {copy.source for copy in _copies.values()}


def forget_sources(numbers: Container[int]) -> None:
    """Forget copies of weights that are gone, whose ids the weights of a new model have now."""
    with _lock:
        for weight, copy in list(_copies.items()):
            if copy.source in numbers:
                del _copies[weight]


def watched_copies() -> list[tuple[Tensor, int]]:
    """The copies that are not left alone, each with the id of its source."""
    with _lock:
        return [(weight, copy.source) for weight, copy in _copies.items() if copy.is_watched]


def leave_copies(weights: Iterable[Tensor] | None = None) -> None:
    """Leave some copies alone, or all: they are copies still, but are watched no longer."""
    with _lock:
        every = _copies.values() if weights is None else map(_copies.get, weights)
        for copy in every:
            if copy is not None:
                copy.is_watched = False
