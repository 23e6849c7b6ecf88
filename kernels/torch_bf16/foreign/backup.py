"""What objects hold before a call that may have to be undone."""

from __future__ import annotations

import functools
import operator
import random
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .contents import objects_in

__all__ = ["Backup"]


class Backup:
    """The contents of objects, however deep, to be put back into these same objects.

    A call gets the objects themselves, and not copies: others may hold them, too, as a program its
    random number generator, and some cannot be copied, such as locks and open files. These, and
    other objects without a ``__dict__``, stay as the call has left them.

    Args:
        values: mutable objects, or what holds them. Modules and optimizers are not looked into.
    """

    def __init__(self, *values: Any) -> None:
        self._undo = [undo for each in objects_in(values) for undo in _undoing(each)]

    def restore(self) -> None:
        """Put the contents back; may be called several times."""
        for undo in self._undo:
            undo()


def _undoing(value: Any) -> Iterator[Callable[[], Any]]:
    """What puts the present contents of one object back into it."""
    # Not isinstance: the class of an object may raise anything when it is asked.
    kind = type(value)
    if issubclass(kind, (type, ModuleType, nn.Module, torch.optim.Optimizer)):
        return
    if issubclass(kind, Tensor):
        yield functools.partial(_write, value, value.detach().clone())
    elif issubclass(kind, np.ndarray):
        if value.flags.writeable:
            yield functools.partial(np.copyto, value, value.copy())
    elif issubclass(kind, torch.Generator):
        yield functools.partial(value.set_state, value.get_state())
    elif issubclass(kind, np.random.Generator):
        yield functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif issubclass(kind, np.random.RandomState):
        yield functools.partial(value.set_state, value.get_state())
    elif issubclass(kind, random.Random):
        yield functools.partial(value.setstate, value.getstate())
    else:
        for container, entries in _containers(value):
            yield functools.partial(_refill, container, entries)


def _containers(value: Any) -> Iterator[tuple[Any, list[Any]]]:
    """An object itself and its attributes, as far as they can be refilled, with their entries."""
    for read in (lambda: value, lambda: value.__dict__):
        try:
            container = read()
            if not issubclass(type(container), (dict, list, set, deque)):
                continue
            entries = _entries(container)
        except Exception:
            # Its class may raise anything, and so does a weak proxy of what is gone.
            continue
        yield container, entries


@torch.no_grad()
def _write(tensor: Tensor, before: Tensor) -> None:
    tensor.copy_(before)


def _refill(container: Any, before: list[Any]) -> None:
    now = _entries(container)
    # Other threads may read what no call has changed.
    if len(now) == len(before) and all(map(operator.is_, now, before)):
        return
    container.clear()
    if isinstance(container, dict):
        half = len(before) // 2
        container.update(zip(before[:half], before[half:], strict=True))
    elif isinstance(container, set):
        container.update(before)
    else:
        container.extend(before)


def _entries(container: Any) -> list[Any]:
    """The entries of a container; the keys of a dict, then its values."""
    is_dict = issubclass(type(container), dict)
    return [*container.keys(), *container.values()] if is_dict else [*container]
