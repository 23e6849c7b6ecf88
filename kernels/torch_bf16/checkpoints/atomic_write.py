"""Files that take the place of others only once they are complete and on disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_bf16.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the path of an empty file to write, which then becomes ``path``.

    It lies beside ``path``, is flushed to disk and renamed when the context ends, and is removed
    after an exception. A process that is killed in between leaves the old file and at most one
    ``.<name>.partial``, which the next write of ``path`` overwrites.

    Raises:
        CheckpointError: another process is writing ``path``.
        OSError: the folder is not there, or cannot be written to.
    """
    partial = path.with_name(f".{path.name}.partial")
    # Not truncated before it is locked: another process may be writing it.
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor, partial, path)
        try:
            os.truncate(descriptor, 0)
            yield partial
            os.fsync(descriptor)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    finally:
        os.close(descriptor)
    _sync_folder(path.parent)


def _lock(descriptor: int, partial: Path, path: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have finished since open(), and this may be its checkpoint by now.
        ours = os.path.samestat(os.fstat(descriptor), os.stat(partial))
    except FileNotFoundError:
        ours = False
    except OSError as error:
        # Other errors come from file systems without locks.
        ours = error.errno not in (errno.EAGAIN, errno.EACCES)
    if not ours:
        raise CheckpointError(
            f"another process is writing {path} right now; save from one rank only, or under "
            "another name. Nothing was written"
        )


def _sync_folder(folder: Path) -> None:
    # The rename is on disk only once the folder is.
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
