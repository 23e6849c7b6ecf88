"""Files that take the place of others only once they are complete and on disk."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
    ``.<name>.partial``, which the next write of ``path`` overwrites; safetensors may leave a
    ``.tmp`` file of its own. A link stays, and the file that it names is replaced; permissions
    stay, too.

    Raises:
        CheckpointError: another process or thread is writing ``path``, or it is no file.
        OSError: the folder is not there, or cannot be written to.
    """
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device or a pipe, which the file would replace"
        raise CheckpointError(
            f"{path} is {kind}: give the name of a file to write. Nothing was written"
        )
    path = Path(os.path.realpath(path))
    partial = path.with_name(f".{path.name}.partial")
    with ExitStack() as locks:
        file = locks.enter_context(_locked(partial, path, os.O_CREAT))
        mode = stat.S_IMODE((path.stat() if path.exists() else os.fstat(file)).st_mode)
        try:
            os.truncate(file, 0)
            yield partial
            # safetensors writes another file, closed to other users, and renames it to this one.
            if not _is_at(file, partial):
                file = locks.enter_context(_locked(partial, path, 0))
            os.chmod(partial, mode)
            os.fsync(file)
            os.replace(partial, path)
        except BaseException:
            if _is_at(file, partial):
                partial.unlink()
            raise
    _sync_folder(path.parent)


@contextmanager
def _locked(partial: Path, path: Path, flags: int) -> Iterator[int]:
    """Give the descriptor of a file that no other writer of ``path`` has; it is not truncated."""
    try:
        descriptor = os.open(partial, os.O_RDWR | flags, 0o666)
    except FileNotFoundError:
        if flags:
            raise
        raise _taken(path) from None
    try:
        _lock(descriptor, partial, path)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, partial: Path, path: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another writer may have finished since open(), and this may be its checkpoint by now.
        ours = _is_at(descriptor, partial)
    except OSError as error:
        # Other errors come from file systems without locks.
        ours = error.errno not in (errno.EAGAIN, errno.EACCES)
    if not ours:
        raise _taken(path)


def _taken(path: Path) -> CheckpointError:
    return CheckpointError(
        f"another process is writing {path} right now; save from one rank only, or under another "
        "name. Nothing was written"
    )


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    # The rename is on disk only once the folder is.
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(descriptor)
    except OSError:  # nor do all file systems flush them
        pass
    finally:
        os.close(descriptor)
