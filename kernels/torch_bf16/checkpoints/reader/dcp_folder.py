"""Folders of ``torch.distributed.checkpoint``: any number of ranks' files, without a process group.

``.metadata`` is a pickle, from which only classes that describe tensors are loaded.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_bf16.checkpoints.files import check_records
from torch_bf16.errors import CheckpointError
from torch_bf16.states.schema import HEADER

from .dcp_parts import tensor_of_parts
from .saved import OptimizerStates, Saved, SavedTensor, is_scalar
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
_LARGEST_OBJECT = 1 << 20  # bytes
_WORDS = ("state", "param_groups", HEADER)


def read_dcp(path: Path, weights: bool = True, verify: bool = False) -> Saved:
    """The tensors of a folder, the optimizer's states and its hyperparameters.

    Args:
        path: the folder with ``.metadata``.
        weights: whether the folder must hold weights.
        verify: whether to compare checksums: of small objects now, and of each part of a tensor
            when it is first read.

    Raises:
        CheckpointError: it is damaged, or was made by something else.
        OSError: it cannot be read.
    """
    entries, places, paths = _metadata(path / ".metadata")
    tensors: dict[str, SavedTensor] = {}
    found: dict[Sequence[Any], _States] = defaultdict(_States)
    inside = {key: _within(each) for key, each in paths.items()}
    # Several optimizers have equal numbers, and are told apart by what holds them.
    holders = {each.holder for each in inside.values() if each and each.word == "param_groups"}
    for key, entry in entries.items():
        root = paths[key][0]
        value = functools.partial(_value, path, key, entry, places[key], verify)
        within = inside[key]
        if within is not None and (within.holder in holders or root in STATES):
            found[within.holder].add(within.word, within.rest, value)
        elif root not in STATES and hasattr(entry, "chunks"):
            bare = root in WEIGHTS and len(paths[key]) > 1
            tensors[".".join(map(str, paths[key][1:])) if bare else key] = value()
    if weights and not tensors:
        raise CheckpointError(f"{path} holds no tensors of a model: {', '.join([*entries][:4])}")
    return Saved(path, tensors, [each.optimizer() for each in found.values() if each.states])


class _Within(NamedTuple):
    """Where something is in an optimizer's state dict: what holds that, a word of it, the rest."""

    holder: Sequence[Any]
    word: str
    rest: Sequence[Any]


class _States:
    """What is found of one optimizer."""

    def __init__(self) -> None:
        self.states: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.groups: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.header: dict[str, Any] = {}

    def add(self, word: str, where: Sequence[Any], value: Callable[[], Any]) -> None:
        """Add what a path leads to: ``where`` in the ``word`` of the optimizer's state dict."""
        if word == "param_groups" and not where:
            # A list of the groups, whole.
            self.groups |= enumerate(value() or ())
        elif len(where) > 1 and word == "param_groups":
            self.groups[where[0]][where[-1]] = value()
        elif len(where) > 1 and word == "state":
            *outer, last = where
            # A parameter's name may be a path of its own.
            name = ".".join(map(str, outer)) if len(outer) > 1 else outer[0]
            found = value()
            counts = isinstance(found, SavedTensor) and is_scalar(last, found.shape)
            self.states[name][last] = found.whole() if counts else found
        elif where and word == HEADER:
            of = functools.reduce(lambda d, part: d.setdefault(part, {}), where[:-1], self.header)
            of[where[-1]] = value()

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


def _metadata(file: Path) -> tuple[Mapping[str, Any], Mapping[str, Any], dict[str, Sequence[Any]]]:
    """By key: what was saved, the places of its parts in files, its path in the state dict."""
    content = file.read_bytes()
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
            f"{file} is not what torch.distributed.checkpoint writes: "
            f"{str(error).strip()[:300] or type(error).__name__}"
        ) from None
    return entries, places, {key: tuple(paths.get(key) or key.split(".")) for key in entries}


def _within(path: Sequence[Any]) -> _Within | None:
    """The place in an optimizer's state dict that a path leads to; None if it leads elsewhere."""
    for at, part in enumerate(path):
        if part in _WORDS:
            return _Within(path[:at], part, path[at + 1 :])
        # A state dict that was flattened has names such as "state.layer.weight.exp_avg".
        word, _, rest = str(part).partition(".")
        name, dot, last = rest.rpartition(".")
        if dot and word in _WORDS and at == len(path) - 1:
            return _Within(path[:at], word, (name, last))
    return None


def _value(
    folder: Path, key: str, entry: Any, places: dict[tuple[int, ...], Any], verify: bool
) -> Any:
    """A tensor; or a small object, if torch can load it without running code; else None.

    Raises:
        CheckpointError: a part is not there, or, if ``verify``, such an object is damaged.
    """
    if hasattr(entry, "chunks"):
        return tensor_of_parts(folder, key, entry, places, verify)
    place = next(iter(places.values()), None)
    if place is None or place.length > _LARGEST_OBJECT:
        return None
    file = folder / place.relative_path
    try:
        with file.open("rb") as whole:
            whole.seek(place.offset)
            content = io.BytesIO(whole.read(place.length))
        check_records(content)
        content.seek(0)
    # zipfile raises almost anything over damaged bytes.
    except Exception as error:
        if verify:
            raise CheckpointError(
                f"{file} is damaged at byte {place.offset:,}, where {key} lies: {error}"
            ) from None
        return None
    try:
        return torch.load(content, weights_only=True)
    # What is left is of other classes.
    except Exception:
        return None
