"""Silence and time limits for libraries that print, warn at every step, or compile forever."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

__all__ = ["quiet", "time_limit"]


@contextmanager
def quiet() -> Iterator[None]:
    """Drop warnings, log messages, and what is printed by this process and by its children."""
    sys.stdout.flush()
    sys.stderr.flush()
    # The descriptors, too, because compilers and autotuners write from C++ and child processes.
    kept = [os.dup(number) for number in (1, 2)]
    disabled = logging.root.manager.disable
    with (
        tempfile.TemporaryFile("w", errors="replace") as sink,
        redirect_stdout(sink),
        redirect_stderr(sink),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        for number in (1, 2):
            os.dup2(sink.fileno(), number)
        try:
            yield
        finally:
            sink.flush()
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            logging.disable(disabled)


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
