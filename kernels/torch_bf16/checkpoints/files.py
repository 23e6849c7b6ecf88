"""Checkpoint files that are whole or refused, whatever happened while they were written.

A file is what ``torch.save`` writes, a zip archive, and its zip comment holds a CRC-32 of all that
is before it; ``torch.load`` reads it, too, but checks nothing: torch builds its zip reader without
checksums, and most flipped bits become other numbers in silence.
"""

from __future__ import annotations

import errno
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from torch_bf16.errors import CheckpointError
from torch_bf16.optim import BF16Optimizer

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["load_checkpoint", "save_checkpoint"]

_COMMENT = "torch-bf16 checkpoint 1, crc32 {:08x} of {:020d} bytes\n"
_PATTERN = re.compile(rb"torch-bf16 checkpoint (\d+), crc32 ([0-9a-f]{8}) of (\d{20}) bytes\n")
_COMMENT_SIZE = len(_COMMENT.format(0, 0))
_PIECE = 1 << 22


def save_checkpoint(path: str | os.PathLike[str], **parts: Any) -> None:
    """Write a checkpoint file; until it is complete and on disk, the old one stays in its place.

    The file is written beside ``path``, flushed to disk, read back without its tensors and
    renamed. A process that is killed in between leaves the old file and at most one
    ``.<name>.partial``, which the next save overwrites. In a distributed run call it on one rank.

    Args:
        path: the file; its folder must exist.
        **parts: the names to load them by. What has a ``state_dict`` method (modules, optimizers,
            schedulers) is saved by it; all else as it is: tensors, numbers, text and containers
            of them, which is what ``weights_only=True`` loads.

    Raises:
        CheckpointError: a part could not be loaded again with ``weights_only=True``, or another
            process is writing this file; the file at ``path`` is as it was.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(f"{folder}/run.pt", model=model, optimizer=optimizer, epoch=3)
        ...     rest = load_checkpoint(f"{folder}/run.pt", model=model, optimizer=optimizer)
        >>> rest["epoch"]
        3
    """
    path = Path(path)
    states = {n: p.state_dict() if hasattr(p, "state_dict") else p for n, p in parts.items()}
    partial = path.with_name(f".{path.name}.partial")
    # Not truncated before it is locked: another process may be writing it.
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
    with os.fdopen(descriptor, "rb+") as file:
        _lock(file, path)
        try:
            file.truncate()
            writer: Any = _Writer(file)
            torch.save(states, writer)
            writer.finish()
            os.fsync(file.fileno())
            _check_loads(partial, path)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    _sync_folder(path.parent)


def load_checkpoint(path: str | os.PathLike[str], /, **parts: Any) -> dict[str, Any]:
    """Load a file of :func:`save_checkpoint` into the objects that it was saved from.

    The whole file is checked first, then whether modules and optimizers fit; nothing is changed in
    memory unless all do. Modules are loaded before optimizers, whatever the order given.

    Args:
        path: the file.
        **parts: objects with a ``load_state_dict`` method, by the names they were saved under.

    Returns:
        The parts of the file that were not asked for, on the CPU.

    Raises:
        FileNotFoundError: there is no file.
        CheckpointError: it is truncated, damaged or not one of these files, lacks a part, or
            is of another model.
        StateMismatchError: it does not fit an optimizer.
    """
    path = Path(path)
    with path.open("rb") as file:
        _check_whole(file, path)
        states = torch.load(file, map_location="cpu", weights_only=True)
    if missing := parts.keys() - states.keys():
        raise CheckpointError(
            f"{path} has no {', '.join(sorted(missing))}; it holds {', '.join(states)}. Ask for "
            "those. Nothing was changed"
        )
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            _check_fits(part, states[name], f"{name} in {path}")
        elif isinstance(part, BF16Optimizer):
            part.check_state_dict(states[name])
    # An exact master is stored as what its weight lacks, so weights come first.
    for name in sorted(parts, key=lambda name: not isinstance(parts[name], nn.Module)):
        parts[name].load_state_dict(states.pop(name))
    return states


class _Writer:
    """What ``torch.save`` writes to: counts and sums, and puts the comment at the end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._held = b""
        self._crc, self._size = 0, 0

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        # The last two bytes of an archive are the length of its comment, which finish() sets.
        tail = self._held + bytes(data[-2:])
        self._put(tail[: -2 if len(data) < 2 else len(self._held)])
        self._put(data[:-2])
        self._held = tail[-2:]
        return len(data)

    def _put(self, data: Any) -> None:
        self._crc = zlib.crc32(data, self._crc)
        self._size += len(data)
        self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        self._put(_COMMENT_SIZE.to_bytes(2, "little"))
        self._file.write(_COMMENT.format(self._crc, self._size).encode())
        self._file.flush()


def _lock(file: BinaryIO, path: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            return  # a file system without locks
        raise CheckpointError(
            f"another process is writing {path} right now; save from one rank only, or under "
            "another name. Nothing was written"
        ) from None


def _check_loads(partial: Path, path: Path) -> None:
    try:
        # Storages are mapped, not read: this unpickles the names and no more.
        torch.load(partial, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{path} was not written, because weights_only=True could not load it again: {reason} "
            "Pass tensors, numbers, text and containers of them"
        ) from error


def check_if_ours(path: Path) -> None:
    """Refuse a damaged file that ends as :func:`save_checkpoint` ends them; pass any other.

    Raises:
        CheckpointError: its checksum is not that of its bytes.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _COMMENT_SIZE, 0))
        if _PATTERN.fullmatch(file.read()):
            _check_whole(file, path)


def _check_whole(file: BinaryIO, path: Path) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - _COMMENT_SIZE, 0))
    match = _PATTERN.fullmatch(file.read())
    if match is None:
        raise CheckpointError(
            f"{path} ({size:,} bytes) does not end as save_checkpoint ends its files: it was cut "
            "short or damaged, or something else wrote it. torch.load(path, weights_only=True) "
            "reads files of torch.save. Nothing was changed"
        )
    version, crc, length = int(match[1]), int(match[2], 16), int(match[3])
    if version > 1:
        raise CheckpointError(
            f"{path} has version {version} and this torch_bf16 reads version 1; update torch-bf16. "
            "Nothing was changed"
        )
    file.seek(0)
    found, left = 0, size - _COMMENT_SIZE
    while piece := file.read(min(_PIECE, left)):
        found = zlib.crc32(piece, found)
        left -= len(piece)
    if (length, crc) != (size - _COMMENT_SIZE, found):
        raise CheckpointError(
            f"{path} is damaged: it has crc32 {found:08x} over {size - _COMMENT_SIZE:,} bytes, and "
            f"{crc:08x} over {length:,} was written. Load an older checkpoint. Nothing was changed"
        )
    file.seek(0)


def _check_fits(module: nn.Module, state: Any, label: str) -> None:
    """Compare names and shapes, so that a module is not left half loaded."""
    saved = state if isinstance(state, Mapping) else {}
    live = module.state_dict()
    lacking, unknown = sorted(live.keys() - saved.keys()), sorted(saved.keys() - live.keys())
    shapes = {
        name: (tuple(each.shape), tuple(getattr(saved.get(name), "shape", ())))
        for name, each in live.items()
        if isinstance(each, torch.Tensor)
    }
    other = [f"{name} {b} for {a}" for name, (a, b) in shapes.items() if a != b]
    if lacking or unknown or other:
        found = [
            f"{kind} {', '.join(names[:4])}"
            for kind, names in (("lacks", lacking), ("has unknown", unknown), ("has shapes", other))
            if names
        ]
        raise CheckpointError(
            f"{label} is of another model: it {'; it '.join(found)}. Load it into the model that "
            "it was saved from. Nothing was changed"
        )


def _sync_folder(folder: Path) -> None:
    # The rename itself is on disk only when the folder is.
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
