"""Locks that are free in a forked child.

A child, as a worker of a ``DataLoader`` is one, has none of the other threads of its parent. A lock
that one of them held stays held there, and whatever waits for it hangs: a collection of garbage is
enough, since tables of weights lock themselves when a weight dies.
"""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakSet

__all__ = ["fork_safe_lock"]

_locks: WeakSet[Any] = WeakSet()


def fork_safe_lock() -> threading.RLock:
    """A lock that its thread may take again, and that no thread holds in a forked child.

    Only the thread that forks keeps, in the child, what it holds.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _free_in_child() -> None:
    for lock in _locks:
        # As the standard library frees its own ones.
        if not lock._is_owned():
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_free_in_child)
