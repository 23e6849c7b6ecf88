"""Folders of ``torch.distributed.checkpoint``: any number of ranks' files, without a process group.

``.metadata`` is a pickle, from which only classes that describe tensors are loaded. Each part of a
tensor is a file of torch.save within a file; its numbers are read in place.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import re
import struct
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_bf16.errors import CheckpointError
from torch_bf16.states.schema import HEADER

from .saved import OptimizerStates, Saved, SavedTensor, is_number, read_numbers
from .torch_file import STATES, WEIGHTS

__all__ = ["read_dcp"]

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata"),
        *("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "strided"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}
_SMALL = 1 << 20
_WORDS = ("state", "param_groups", HEADER)


class _Part(NamedTuple):
    """A box of a tensor, and the place of its numbers in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    at: int
    length: int


def read_dcp(path: Path, weights: bool = True) -> Saved:
    """The tensors of a folder, the optimizer's states and its hyperparameters.

    Args:
        path: the folder with ``.metadata``.
        weights: whether the folder must hold weights.

    Raises:
        CheckpointError: it is damaged, or was made by something else.
        OSError: it cannot be read.
    """
    with (path / ".metadata").open("rb") as file:
        content = file.read()
    try:
        metadata: Any = _Unpickler(io.BytesIO(content)).load()
        entries = metadata.state_dict_metadata
        places: dict[str, dict[tuple[int, ...], Any]] = defaultdict(dict)
        for index, place in metadata.storage_data.items():
            places[index.fqn][tuple(index.offset or ())] = place
        paths = metadata.planner_data or {}
    # A file that is no pickle, or one of something else, may raise almost anything.
    except Exception as error:
        raise CheckpointError(
            f"{path / '.metadata'} is not what torch.distributed.checkpoint writes: "
            f"{str(error).strip()[:300] or type(error).__name__}"
        ) from None
    tensors: dict[str, SavedTensor] = {}
    wheres = {key: tuple(paths.get(key) or key.split(".")) for key in entries}
    split = {key: _split(where) for key, where in wheres.items()}
    # Several optimizers have equal numbers, and are told apart by what holds them.
    holders = {at for at, word, _ in filter(None, split.values()) if word == "param_groups"}
    found: dict[Sequence[Any], _States] = defaultdict(_States)
    for key, entry in entries.items():
        where, parts = wheres[key], split[key]
        if parts is None or not (parts[0] in holders or where[0] in STATES):
            if hasattr(entry, "chunks") and where[0] not in STATES:
                bare = where[0] in WEIGHTS and len(where) > 1
                name = ".".join(map(str, where[1:])) if bare else key
                tensors[name] = _tensor(path, key, entry, places[key])
            continue
        each, word, inner = found[parts[0]], *parts[1:]
        if word == "state" and hasattr(entry, "chunks") and len(inner) > 1:
            tensor = _tensor(path, key, entry, places[key])
            name = ".".join(map(str, inner[:-1])) if len(inner) > 2 else inner[0]
            counts = is_number(inner[-1], tensor.shape)
            each.states[name][inner[-1]] = tensor.read(0, 1) if counts else tensor
        elif word == "param_groups" and len(inner) > 1:
            each.groups[inner[0]][inner[-1]] = _object(path, places[key])
        elif word == "param_groups":
            each.groups |= enumerate(_object(path, places[key]) or ())
        elif word == HEADER and inner:
            of = functools.reduce(lambda d, part: d.setdefault(part, {}), inner[:-1], each.header)
            of[inner[-1]] = _object(path, places[key])
    if weights and not tensors:
        raise CheckpointError(f"{path} holds no tensors of a model: {', '.join([*entries][:4])}")
    return Saved(path, tensors, [each.optimizer() for each in found.values() if each.states])


class _States:
    """What is found of one optimizer."""

    def __init__(self) -> None:
        self.states: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.groups: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.header: dict[str, Any] = {}

    def optimizer(self) -> OptimizerStates:
        for name, group in self.groups.items():
            if isinstance(name, str):
                # Flattened, each parameter has a group of its own.
                group.setdefault("params", [name])
        # Parameters' numbers became text when they were made part of a path.
        numbers = {key for group in self.groups.values() for key in group.get("params") or ()}
        texts = {key for key in self.states if key not in numbers and str(key).isdigit()}
        by_key = {int(key) if key in texts else key: each for key, each in self.states.items()}
        return OptimizerStates(by_key, list(self.groups.values()), self.header)


class _Unpickler(pickle.Unpickler):
    """Loads descriptions of tensors, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        # By whole names: a dotted one may lead to what the module has imported.
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not loaded or run")


def _split(where: Sequence[Any]) -> tuple[Sequence[Any], str, Sequence[Any]] | None:
    """A path into an optimizer's state dict: what holds that, a word of it, and what follows."""
    for at, part in enumerate(where):
        if part in _WORDS:
            return where[:at], part, where[at + 1 :]
        # A state dict that was flattened has names such as "state.layer.weight.exp_avg".
        word, _, rest = str(part).partition(".")
        name, dot, last = rest.rpartition(".")
        if dot and word in _WORDS and at == len(where) - 1:
            return where[:at], word, (name, last)
    return None


def _tensor(path: Path, key: str, entry: Any, by_offset: dict[tuple[int, ...], Any]) -> SavedTensor:
    parts, dtype = [], entry.properties.dtype
    for chunk in entry.chunks:
        place = by_offset.get(tuple(chunk.offsets))
        if place is None and len(entry.chunks) == 1:
            place = next(iter(by_offset.values()), None)
        if place is None:
            raise CheckpointError(f"{path}: {key} lacks its part at {tuple(chunk.offsets)}")
        file = path / place.relative_path
        if not file.is_file() or file.stat().st_size < place.offset + place.length:
            raise CheckpointError(
                f"{file} is not there or was cut short: {key} lies in it, up to byte "
                f"{place.offset + place.length:,}. The checkpoint is incomplete"
            )
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if dtype.is_complex:
            offsets, sizes = (*offsets, 0), (*sizes, 2)
        parts.append(_Part(offsets, sizes, file, place.offset, place.length))
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
    if not shape:
        return _numbers(key, parts[0], dtype, 0, 1)
    row = max(1, prod(shape[1:]))
    first, last = start // row, -(-stop // row)
    rows = torch.empty((last - first, *shape[1:]), dtype=dtype, device="cpu")
    for part in parts:
        a, b = max(first, part.offsets[0]), min(last, part.offsets[0] + part.sizes[0])
        if a >= b or not prod(part.sizes):
            continue
        width = prod(part.sizes[1:])
        begin = a - part.offsets[0]
        piece = _numbers(key, part, dtype, begin * width, (begin + b - a) * width)
        columns = zip(part.offsets[1:], part.sizes[1:], strict=True)
        box = (slice(a - first, b - first), *(slice(at, at + size) for at, size in columns))
        rows[box] = piece.view(b - a, *part.sizes[1:])
    return rows.view(-1)[start - first * row : stop - first * row]


def _numbers(key: str, part: _Part, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """Elements of a part, from the archive that torch.save made of it."""
    at, size, strides = _storage(part)
    if size != prod(part.sizes) * dtype.itemsize:
        raise CheckpointError(
            f"{part.file}: {key} of shape {part.sizes} has {size:,} bytes; it is damaged, or was "
            "written by a planner that compresses"
        )
    if len(strides) < len(part.sizes):
        # Complex numbers are read as pairs.
        strides = (*(2 * stride for stride in strides), 1)
    row_major = [prod(part.sizes[dim + 1 :]) for dim in range(len(part.sizes))]
    axes = zip(part.sizes, strides, row_major, strict=True)
    if all(stride == usual for length, stride, usual in axes if length > 1):
        return read_numbers(part.file, at, dtype, start, stop)
    # The memory of a tensor in channels_last, or of a transposed one, was saved as it lies.
    whole = read_numbers(part.file, at, dtype, 0, prod(part.sizes))
    return whole.as_strided(part.sizes, strides).reshape(-1)[start:stop].clone()


@functools.lru_cache(maxsize=4096)
def _storage(part: _Part) -> tuple[int, int, tuple[int, ...]]:
    """Where in its file the numbers of a part begin, how many bytes they take, their strides."""
    try:
        with part.file.open("rb") as file, zipfile.ZipFile(_Slice(file, part)) as archive:
            (info,) = (e for e in archive.infolist() if e.filename.endswith("/data/0"))
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


def _object(path: Path, places: dict[tuple[int, ...], Any]) -> Any:
    """A small object, if torch can load it without running code; else None."""
    place = next(iter(places.values()), None)
    if place is None or place.length > _SMALL:
        return None
    try:
        with (path / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            return torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
    except Exception:
        return None
