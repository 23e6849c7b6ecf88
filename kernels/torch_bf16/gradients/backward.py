"""Backward passes: what each leaves for its end, and what is taken within it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["Passes", "at_end_of_backward", "released"]

_T = TypeVar("_T")

released: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The parameters whose gradients are freed within the backward pass, each with a weak reference to
the object that takes its step."""


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call once the running backward pass is over, after what DDP and FSDP2 do at its end."""
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    # They queue theirs in the middle of the pass: one that is queued at its end comes after them.
    queue(lambda: queue(call))


class Passes(Generic[_T]):
    """One object per running backward pass, whatever its thread, and also for nested passes.

    Args:
        make: makes the object when a pass first asks for it.
        finish: called with it at the end of the pass. A pass that fails has no such end, and leaves
            nothing here.
    """

    def __init__(self, make: Callable[[], _T], finish: Callable[[_T], None]) -> None:
        self._make, self._finish = make, finish
        # Autograd alone holds them, in what it calls at the end.
        self._running: WeakValueDictionary[int, _T] = WeakValueDictionary()
        # Each device has a thread of its own in a pass.
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[_T]:
        return iter(list(self._running.values()))

    def current(self) -> _T | None:
        """That of the pass that is running here; None where none is."""
        task = torch._C._current_graph_task_id()
        found = self._running.get(task)
        if found is None and task >= 0:
            with self._lock:
                found = self._running.get(task)
                if found is None:
                    found = self._running[task] = self._make()
                    at_end_of_backward(functools.partial(self._finish, found))
        return found
