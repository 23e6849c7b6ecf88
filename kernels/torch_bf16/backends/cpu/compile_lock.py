"""A lock for processes that need a kernel at once: one compiles it, the others read it from disk.

Ranks on one machine reach their first step together, and would each compile everything.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:
    # Without locks each process compiles for itself.
    fcntl = None

__all__ = ["compile_lock"]

# Seconds. A kernel takes two to five; a process that has waited longer compiles it, too.
_LONGEST, _PAUSE = 20.0, 0.02
# Enough that few kernels of different names share a file.
_FILES = 64


@contextlib.contextmanager
def compile_lock(name: str) -> Iterator[None]:
    """Keep other processes of this user from compiling a kernel of this name, or wait for one.

    The lock ends with the process that holds it. If files cannot be locked, no process waits.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            if fcntl is not None:
                file = stack.enter_context(open(_file(name), "ab"))
                end = time.monotonic() + _LONGEST
                while time.monotonic() < end:
                    with contextlib.suppress(BlockingIOError):
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    time.sleep(_PAUSE)
        yield


def _file(name: str) -> Path:
    number = zlib.crc32(name.encode()) % _FILES
    return Path(tempfile.gettempdir()) / f"torch-bf16-{os.getuid()}-{number}.lock"
