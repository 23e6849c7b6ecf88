"""Backward passes, and work that each leaves to its end."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch

from torch_bf16.locks import fork_safe_lock

__all__ = ["Passes"]

_T = TypeVar("_T")


class Passes(Generic[_T]):
    """One object per running backward pass, in any thread, and for nested passes, too.

    Args:
        make: makes the object when a pass first needs it.
        finish: called with the object at the end of the pass. A pass that fails never calls it, and
            its object is freed.
    """

    def __init__(self, make: Callable[[], _T], finish: Callable[[_T], None]) -> None:
        self._make, self._finish = make, finish
        # Only autograd holds the objects, in its callback for the end of the pass.
        self._running: WeakValueDictionary[int, _T] = WeakValueDictionary()
        # In a pass each device has a thread of its own.
        self._lock = fork_safe_lock()

    def __iter__(self) -> Iterator[_T]:
        return iter(list(self._running.values()))

    def current(self) -> _T | None:
        """The object of the pass that is running in this thread; None if none is."""
        task = torch._C._current_graph_task_id()
        running = self._running.get(task)
        if running is None and task >= 0:
            with self._lock:
                running = self._running.get(task)
                if running is None:
                    running = self._running[task] = self._make()
                    _at_end_of_backward(functools.partial(self._finish, running))
        return running


def _at_end_of_backward(call: Callable[[], None]) -> None:
    """Call ``call`` when the running backward pass ends, after DDP's and FSDP2's own callbacks."""
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    # They queue theirs during the pass: a callback that is queued at its end comes after them.
    queue(lambda: queue(call))
