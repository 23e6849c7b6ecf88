"""Locks between processes of one machine: a file each, and they end with whoever holds them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None

__all__ = ["locked"]

_PAUSE = 0.02


@contextlib.contextmanager
def locked(path: Path, seconds: float = 0.0) -> Iterator[FileIO | None]:
    """Hold the lock of a file, and yield the file, opened to append.

    Args:
        path: the file, which is created if it is not there.
        seconds: how long to wait for another process. Then, and where files cannot be locked, None
            is yielded.
    """
    with contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):
            if fcntl is not None:
                # Without a buffer, which closing would write, perhaps to a full disk.
                opened = FileIO(path, "ab")
                stack.callback(_close, opened)
                end = time.monotonic() + seconds
                while file is None:
                    try:
                        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        file = opened
                    except BlockingIOError:
                        if time.monotonic() >= end:
                            break
                        time.sleep(_PAUSE)
        yield file


def _close(file: FileIO) -> None:
    with contextlib.suppress(OSError), file:
        if fcntl is not None:
            # A child that was forked meanwhile has the file open, too, and would keep the lock.
            fcntl.flock(file, fcntl.LOCK_UN)
