"""Checkpoint files that are whole or refused, whatever happened while they were written.

A file is what ``torch.save`` writes, a zip archive with a CRC-32 of each record. ``torch.load``
compares none of them, so that most flipped bits would become other numbers in silence.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from torch_bf16.engine.wrappers import held_optimizers
from torch_bf16.errors import CheckpointError, first_line, suffix_errors, with_article
from torch_bf16.optim.loading import check_groups
from torch_bf16.optim.optimizer import BF16Optimizer
from torch_bf16.parameters import parameters_of
from torch_bf16.sharding import any_flattened, is_incomplete, shard_of
from torch_bf16.states.schema import HEADER

from .atomic_write import replacing
from .module_fit import check_fits

__all__ = [
    "check_complete",
    "check_records",
    "damaged_safetensors",
    "first_keys",
    "load_checkpoint",
    "read_file",
    "save_checkpoint",
]

_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch.save's number before it wrote zip files
_FOLDER = 0x10  # MS-DOS's attribute, in zip's directory


def save_checkpoint(path: str | os.PathLike[str], /, **parts: Any) -> None:
    """Write a checkpoint file; until it is complete and on disk, the old one stays in its place.

    The file is written beside ``path``, flushed to disk, read back without its tensors and
    renamed. A process that is killed in between leaves the old file and at most one
    ``.<name>.partial``, which the next save overwrites. In a distributed run call it on one rank.

    Args:
        path: the file; its folder must exist.
        **parts: the parts to save, by the names to load them by. Objects with a ``state_dict``
            method (modules, optimizers, schedulers) are saved by it; all else as it is: tensors,
            numbers, text and containers of them, which is what ``weights_only=True`` loads.

    Raises:
        CheckpointError: a part could not be loaded again with ``weights_only=True``, a tensor is
            sharded, so that this rank lacks some of it, or another process is writing this file;
            the file at ``path`` is as it was.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(f"{folder}/run.pt", model=model, optimizer=optimizer, epoch=3)
        ...     rest = load_checkpoint(f"{folder}/run.pt", model=model, optimizer=optimizer)
        >>> rest["epoch"]
        3
    """
    path = Path(path)
    for name, part in parts.items():
        _check_not_flattened(part, name)
    states = {n: p.state_dict() if hasattr(p, "state_dict") else p for n, p in parts.items()}
    check_complete(states)
    with replacing(path) as partial:
        with _checksums(), partial.open("rb+") as file:
            torch.save(states, file)
        _check_loads(partial, path)


def load_checkpoint(path: str | os.PathLike[str], /, **parts: Any) -> dict[str, Any]:
    """Load a file of :func:`save_checkpoint` into the objects that it was saved from.

    The whole file is checked first, then whether modules and optimizers fit; nothing is changed in
    memory unless all do. Schedulers and other parts, which only they can check, are loaded first,
    then modules, then optimizers, in whatever order they are passed. Modules that convert what they
    load, by hooks or a method of their own, check it only then, too.

    Args:
        path: the file; one in which ``torch.save`` has saved a dict, as a zip file, will do.
        **parts: objects with a ``load_state_dict`` method, by the names they were saved under.

    Returns:
        The parts of the file that were not requested, on the CPU.

    Raises:
        ValueError: a part has no ``load_state_dict`` method.
        FileNotFoundError: there is no file.
        MemoryError: the machine has too little memory for it.
        CheckpointError: it is truncated, damaged or not what ``torch.save`` writes, lacks a part,
            or is of another model.
        StateMismatchError: it does not fit an optimizer.
    """
    path = Path(path)
    for name, part in parts.items():
        if not hasattr(part, "load_state_dict"):
            raise ValueError(
                f"load_checkpoint loads into objects with a load_state_dict method, and {name} is "
                f"of type {type(part).__name__}, without one. Leave it out: what was saved is "
                f"load_checkpoint(...)[{name!r}]. Nothing was changed"
            )
    states = read_file(path)
    if missing := parts.keys() - states.keys():
        raise CheckpointError(
            f"{path} has no {', '.join(sorted(missing))}; it holds {first_keys(states)}. Ask for "
            "those. Nothing was changed"
        )
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            check_fits(part, states[name], f"{name} in {path}")
        else:
            _check_optimizer(part, states[name], f"{name} in {path}")
    for name in sorted(parts, key=lambda name: _turn(parts[name], states[name])):
        parts[name].load_state_dict(states.pop(name))
    return states


def _turn(part: Any, saved: Any) -> int:
    """When a part is loaded: those that nothing has checked, then modules, then optimizers.

    An exact master is stored as the bits that its weight lacks, so weights come first.
    """
    if isinstance(part, nn.Module):
        return 1
    return 2 if isinstance(part, torch.optim.Optimizer) or _is_ours(saved) else 0


def _is_ours(saved: Any) -> bool:
    return isinstance(saved, Mapping) and HEADER in saved


def _check_optimizer(part: Any, saved: Any, label: str) -> None:
    """Check a state dict for an optimizer, or for what a wrapper passes its state dict to."""
    if isinstance(part, BF16Optimizer):
        part.check_state_dict(saved)
    elif _is_ours(saved) and (held := held_optimizers(part)):
        for each in held:
            each.check_state_dict(saved)
    elif isinstance(part, torch.optim.Optimizer):
        if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
            raise CheckpointError(
                f"{label} is {with_article(saved)} and no state dict of an optimizer, with 'state' "
                "and 'param_groups'. Nothing was changed"
            )
        with suffix_errors("Nothing was changed"):
            check_groups(part, saved)


def first_keys(content: Mapping[Any, Any]) -> str:
    """The first few keys of what was read from a file, for a message."""
    return ", ".join(map(str, [*content][:8])) or "nothing"


def check_complete(content: Any, name: str = "") -> None:
    """Raise if this rank has only a part of a tensor, which would be taken for the whole.

    Raises:
        CheckpointError: there is such a tensor.
    """
    if isinstance(content, Mapping):
        for key, each in content.items():
            check_complete(each, f"{name}.{key}" if name else str(key))
    elif isinstance(content, (list, tuple)):
        for number, each in enumerate(content):
            check_complete(each, f"{name}.{number}")
    elif is_incomplete(content):
        raise CheckpointError(
            f"{name!r} is sharded, and this rank has a part of it: it is placed as "
            f"{tuple(content.placements)} on a mesh of {tuple(content.device_mesh.shape)}. On all "
            "ranks call torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer, "
            "options=StateDictOptions(full_state_dict=True)), and write on one what it returns; or "
            "write all parts by torch.distributed.checkpoint.save. Nothing was written"
        )


def _check_not_flattened(part: Any, name: str) -> None:
    """FSDP1's optimizer gives a rank's parts as plain tensors, so its parameters must be asked."""
    if not isinstance(part, torch.optim.Optimizer):
        return
    parameters = parameters_of(part)
    if not any_flattened(parameters) or torch.distributed.get_world_size() == 1:
        return
    if any(shard_of(each).sharded for each in parameters if any_flattened([each])):
        raise CheckpointError(
            f"{name!r} is an optimizer of parameters that FullyShardedDataParallel (FSDP1) has "
            "sharded, and this rank has the states of a part of them. Call "
            "FSDP.optim_state_dict(model, optimizer) on all ranks, and write on one what it "
            "returns. Nothing was written"
        )


def damaged_safetensors(path: Path, why: object) -> CheckpointError:
    """The error for a safetensors file that cannot be read."""
    return CheckpointError(
        f"{path} ({os.path.getsize(path):,} bytes) was cut short or damaged, or is not a "
        f"safetensors file: {why}. Download or save it again"
    )


def check_records(file: Path | BinaryIO) -> None:
    """Compare the checksums of all records of a file of ``torch.save``.

    Raises:
        BadZipFile: a record is damaged; zipfile may raise almost anything else over damaged bytes.
    """
    with zipfile.ZipFile(file) as archive:
        damaged = archive.testzip()
        # torch reads a record that is marked as a folder as one without bytes.
        folders = [each.filename for each in archive.infolist() if each.external_attr & _FOLDER]
    if damaged is not None or folders:
        raise zipfile.BadZipFile(f"its record {damaged or folders[0]} is damaged")


def read_file(path: Path) -> dict[str, Any]:
    """The content of a file of ``torch.save``, on the CPU, after comparing all checksums.

    Raises:
        FileNotFoundError: there is no file.
        MemoryError: the machine has too little memory for it.
        CheckpointError: it is truncated or damaged, or holds something other than named parts.
    """
    with path.open("rb") as file:
        if file.read(len(_OLD)) == _OLD:
            raise CheckpointError(
                f"{path} was saved with _use_new_zipfile_serialization=False, and such a file has "
                "no checksums that would tell whether it is whole. If you trust it, read it with "
                "torch.load(path, weights_only=True) and save it again. Nothing was changed"
            )
        try:
            check_records(file)
            file.seek(0)
            content = torch.load(file, map_location="cpu", weights_only=True)
        # zipfile and torch raise almost anything over damaged bytes.
        except Exception as error:
            if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
                raise MemoryError(
                    f"{path} ({os.path.getsize(path):,} bytes) was not loaded, because the machine "
                    f"has too little free memory: {first_line(error)}. The file is not at fault: "
                    "free memory and load it again. Nothing was changed"
                ) from error
            if kinds := _foreign_kinds(file):
                raise CheckpointError(
                    f"{path} holds {kinds}, which weights_only=True does not load, because files "
                    "can run code that way. Save tensors, numbers, text and containers of them, "
                    "such as model.state_dict(); or, if you trust its source, read it with "
                    "torch.load(path, weights_only=False). Nothing was changed"
                ) from error
            raise CheckpointError(
                f"{path} ({os.path.getsize(path):,} bytes) was cut short or damaged, or is not a "
                "file that torch.save made of tensors, numbers, text and containers of them: "
                f"{first_line(error).rstrip('.')}. Load an older checkpoint. Nothing was changed"
            ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} holds {with_article(content)} and no parts with names. Read it with "
            "torch.load(path, weights_only=True). Nothing was changed"
        )
    return content


@contextmanager
def _checksums() -> Iterator[None]:
    """Make torch.save compute checksums, which a process may have switched off."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _check_loads(partial: Path, path: Path) -> None:
    try:
        # Storages are mapped, not read: this unpickles only the structure.
        torch.load(partial, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        with partial.open("rb") as file:
            kinds = _foreign_kinds(file)
        why = f"it holds {kinds}" if kinds else first_line(error).rstrip(".")
        raise CheckpointError(
            f"{path} was not written, because weights_only=True could not load it again: {why}. "
            "Pass tensors, numbers of Python, text and containers of them, for example vars(args), "
            "float(best) or str(path)"
        ) from error


def _foreign_kinds(file: Any) -> str:
    """What a file holds that ``weights_only=True`` refuses, by name; empty if that is not known."""
    try:
        file.seek(0)
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file)))
    except Exception:
        return ""
