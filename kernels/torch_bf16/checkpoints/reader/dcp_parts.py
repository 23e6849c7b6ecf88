"""The parts of one tensor in a folder of ``torch.distributed.checkpoint``, read in place.

Each part is a file of torch.save within a file.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_bf16.errors import CheckpointError

from .saved import Box, SavedTensor, boxes, read_numbers

__all__ = ["tensor_of_parts"]


class _Part(NamedTuple):
    """A box of a tensor, and the place of its numbers in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    at: int
    length: int
    # Another file may take the same path while the process runs.
    version: tuple[int, int]
    verify: bool


def tensor_of_parts(
    path: Path, key: str, entry: Any, by_offset: dict[tuple[int, ...], Any], verify: bool = False
) -> SavedTensor:
    """A tensor of which other ranks may have saved other parts.

    Args:
        path: the folder.
        key: the tensor's name in it.
        entry: its ``TensorStorageMetadata``.
        by_offset: the place of each part in the files, by the part's first element.
        verify: whether to compare each part's checksums when it is first read.

    Raises:
        CheckpointError: a part is not there.
    """
    parts, dtype = [], entry.properties.dtype
    there = sum(prod(chunk.sizes) for chunk in entry.chunks)
    if there != prod(entry.size):
        raise CheckpointError(
            f"{path} has {there:,} of the {prod(entry.size):,} elements of {key}: it lacks the "
            "parts of other ranks. Save it with torch.distributed.checkpoint.save on all ranks, "
            "without no_dist"
        )
    for chunk in entry.chunks:
        place = by_offset.get(tuple(chunk.offsets))
        if place is None and len(entry.chunks) == 1:
            place = next(iter(by_offset.values()), None)
        if place is None:
            raise CheckpointError(f"{path}: {key} lacks its part at {tuple(chunk.offsets)}")
        file = path / place.relative_path
        status = file.stat() if file.is_file() else None
        if status is None or status.st_size < place.offset + place.length:
            raise CheckpointError(
                f"{file} is not there or was cut short: {key} lies in it, up to byte "
                f"{place.offset + place.length:,}. The checkpoint is incomplete"
            )
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if dtype.is_complex:
            offsets, sizes = (*offsets, 0), (*sizes, 2)
        version = status.st_ino, status.st_mtime_ns
        parts.append(_Part(offsets, sizes, file, place.offset, place.length, version, verify))
    is_complex, dtype = dtype.is_complex, dtype.to_real()
    shape = (*entry.size, 2) if is_complex else tuple(entry.size)
    read = functools.partial(_read, key, shape, dtype, tuple(parts))
    return SavedTensor(shape, dtype, read, is_complex=is_complex)


def _read(
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    parts: tuple[_Part, ...],
    start: int,
    stop: int,
) -> Tensor:
    found = torch.empty(stop - start, dtype=dtype, device="cpu")
    at = 0
    for index, first, last in boxes(shape or (1,), start, stop):
        inner = shape[len(index) + 1 :]
        count = (last - first) * prod(inner)
        _fill(found[at : at + count].view(last - first, *inner), (index, first, last), key, parts)
        at += count
    return found


def _fill(found: Tensor, box: Box, key: str, parts: tuple[_Part, ...]) -> None:
    """Read a box of a tensor from all parts that have some of it."""
    index, first, last = box
    at = len(index)
    for part in parts:
        offsets, sizes = part.offsets or (0,), part.sizes or (1,)
        inside = [each - offset for each, offset in zip(index, offsets, strict=False)]
        a, b = max(first, offsets[at]), min(last, offsets[at] + sizes[at])
        if a >= b or not all(0 <= i < size for i, size in zip(inside, sizes, strict=False)):
            continue
        columns = zip(offsets[at + 1 :], sizes[at + 1 :], strict=True)
        place = (slice(a - first, b - first), *(slice(at, at + size) for at, size in columns))
        rows = (inside, a - offsets[at], b - offsets[at])
        if found[place].numel():
            found[place] = _numbers(key, part, found.dtype, rows).view_as(found[place])


def _dot(index: Sequence[int], steps: Sequence[int]) -> int:
    return sum(each * step for each, step in zip(index, steps, strict=False))


def _numbers(key: str, part: _Part, dtype: torch.dtype, box: tuple[list[int], int, int]) -> Tensor:
    """A box of a part, from the archive that torch.save made of it."""
    at, size, strides = _storage(part)
    if size != prod(part.sizes) * dtype.itemsize:
        raise CheckpointError(
            f"{part.file}: {key} of shape {part.sizes} has {size:,} bytes; it is damaged, or was "
            "written by a planner that compresses"
        )
    if len(strides) < len(part.sizes):
        # Complex numbers are read as pairs.
        strides = (*(2 * stride for stride in strides), 1)
    index, a, b = box
    leading = len(index)
    row_major = [prod(part.sizes[dim + 1 :]) for dim in range(len(part.sizes))] or [1]
    axes = zip(part.sizes, strides, row_major, strict=False)
    if all(stride == usual for length, stride, usual in axes if length > 1):
        start, row = _dot(index, row_major), row_major[leading]
        return read_numbers(part.file, at, dtype, start + a * row, start + b * row)
    # The memory of a tensor in channels_last, or of a transposed one, was saved as it lies, at any
    # byte of the file: torch needs multiples of the element's size, numpy does not.
    steps = [each * dtype.itemsize for each in strides]
    try:
        lies = np.ndarray(
            (b - a, *part.sizes[leading + 1 :]),
            f"u{dtype.itemsize}",
            np.memmap(part.file, np.uint8, "r"),
            at + _dot([*index, a], steps),
            steps[leading:],
        )
    except ValueError as error:
        raise CheckpointError(f"{part.file}: {key} of shape {part.sizes}: {error}") from None
    return torch.from_numpy(np.ascontiguousarray(lies)).view(dtype)


@functools.lru_cache(maxsize=4096)
def _storage(part: _Part) -> tuple[int, int, tuple[int, ...]]:
    """Where in its file the numbers of a part begin, how many bytes they take, their strides."""
    try:
        with part.file.open("rb") as file, zipfile.ZipFile(_Slice(file, part)) as archive:
            (info,) = (e for e in archive.infolist() if e.filename.endswith("/data/0"))
            if part.verify and (damaged := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"its record {damaged} has another checksum")
            if info.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile("it is compressed")
            description = archive.read(info.filename.removesuffix("data/0") + "data.pkl")
            strides = _Strides(io.BytesIO(description)).load()
            file.seek(part.at + info.header_offset)
            # The header of 30 bytes ends with the lengths of the two fields that follow it.
            lengths = struct.unpack("<26x2H", file.read(30))
            return part.at + info.header_offset + 30 + sum(lengths), info.file_size, strides
    # A description that is damaged may raise almost anything.
    except Exception as error:
        raise CheckpointError(f"{part.file} is damaged at byte {part.at:,}: {error}") from None


class _Strides(pickle.Unpickler):
    """Reads a description of one tensor as its strides, and calls nothing that it names."""

    def find_class(self, module: str, name: str) -> Any:
        known = {
            "_rebuild_tensor_v2": _strides,
            # For dtypes such as float8, which it names before what tells of views.
            "_rebuild_tensor_v3": lambda *given: _strides(*given[:6], *given[7:]),
            "_rebuild_parameter": lambda data, *_: data,
        }
        if module == "torch._utils" and name in known:
            return known[name]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module in ("torch", "torch.storage") and re.fullmatch(r"\w*Storage|[a-z]\w*", name):
            return name
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not loaded or run")

    def persistent_load(self, pid: Any) -> None:
        """The storage, whose place is known."""


def _strides(storage: None, offset: int, size: Any, strides: Any, *rest: Any) -> tuple[int, ...]:
    if offset or len(rest) > 2:
        raise pickle.UnpicklingError("it holds a view of a tensor, such as its conjugate")
    return tuple(strides)


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: Any, part: _Part) -> None:
        self._file, self._begin, self._length, self._at = file, part.at, part.length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        size = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._begin + self._at)
        content = self._file.read(size)
        self._at += len(content)
        return content
