"""A lock for processes that need a kernel at once: one compiles it, the others read it from disk.

Ranks on one machine reach their first step together, and would each compile everything.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from torch_bf16.backends.file_lock import locked

__all__ = ["compile_lock"]

# Seconds. A kernel takes two to five; a process that has waited longer compiles it, too.
_LONGEST = 20.0
# Enough that few kernels of different names share a file.
_FILES = 64


@contextlib.contextmanager
def compile_lock(name: str) -> Iterator[None]:
    """Keep other processes of this user from compiling a kernel of this name, or wait for one.

    If files cannot be locked, each process compiles for itself.
    """
    with locked(_file(name), _LONGEST):
        yield


def _file(name: str) -> Path:
    number = zlib.crc32(name.encode()) % _FILES
    # On Windows the folder is the user's own.
    user = f"{os.getuid()}-" if hasattr(os, "getuid") else ""
    return Path(tempfile.gettempdir()) / f"torch-bf16-{user}{number}.lock"
