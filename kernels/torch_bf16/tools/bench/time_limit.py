"""A time limit for libraries that compile for minutes, or forever."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["time_limit"]


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`TimeoutError` in the block once it has taken this long.

    Only the main thread of a POSIX process can be interrupted; elsewhere there is no limit.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "setitimer"):
        yield
        return

    def give_up(*_: object) -> None:
        raise TimeoutError(f"its first steps took longer than {seconds:g} s (--time-limit)")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
